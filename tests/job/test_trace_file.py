"""OUT.trace.jsonl as a file: what is read back, what is refused, what goes when it is full."""

from __future__ import annotations

import copy
import json
import os
import random
from dataclasses import fields, replace
from pathlib import Path

import orjson
import pytest

from apcbatch.errors import UsageError
from apcbatch.job import trace_file
from apcbatch.job.disk import Disk
from apcbatch.job.segment import End, Passes, Segment, Stems
from apcbatch.job.trace_file import TraceError, TraceFile, read_trace, trace_path

COUNTS = ("requests", "restored", "computed", "memory", "disk", "snapshots", "snapshot_bytes", "dropped", "hidden")


def segment(draw: random.Random, rows: int = 5, **changes) -> Segment:
    """A random one."""
    passes = Passes(*([draw.randint(0, 9) for _ in range(rows)] for _ in fields(Passes)))
    parent = [-1, *(draw.randrange(row) for row in range(1, rows))]
    end = [0]
    for above in parent[1:]:
        end.append(end[above] + draw.randint(0, 9))
    counts = {name: [draw.randrange(1000) for _ in range(rows)] for name in COUNTS}
    begin = [end[max(0, above)] for above in parent]
    text = [draw.choice(["", "a b", "</script>\u2028\x00\n", "é🙂"]) for _ in range(rows)]
    dropped_s = [draw.choice([None, 1.5]) for _ in range(rows)]
    stems = Stems(parent=parent, begin=begin, end=end, text=text, dropped_s=dropped_s, **counts)
    texts = {name: draw.choice(["x", "é"]) for name in ("version", "worker", "input", "model", "fingerprint")}
    facts = {"dtype": "float32", "device": "cpu", "machine": {"cpu": None, "cores": 2}, "begin": 12.5}
    options = [("block_size", 64, "default"), ("stop", ["a"], "--stop")]
    facts |= {"program": ["a", "b"], "options": options, "continue_command": draw.choice([None, "apcbatch run"])}
    whole = Segment(**texts, **facts, passes=passes, stems=stems, end=End(1.5, 3, {"requests": 1}))
    return replace(whole, **changes)


@pytest.fixture
def out(tmp_path) -> Path:
    path = tmp_path / "out.jsonl"
    path.write_text("")
    return path


def opened(out: Path, warned: list[str] | None = None) -> TraceFile:
    """The trace of a run that goes on with what is there."""
    file = TraceFile(out, out, Disk())
    file.check_replaceable()
    file.keep_earlier((warned if warned is not None else []).append)
    return file


def test_what_is_written_is_read(out):
    """Fault: a field, a type or the order of segments is lost on the way."""
    seed = random.randrange(10**6)
    draw, written = random.Random(seed), []
    for number in range(5):
        file = opened(out)
        file.write(segment(draw, end=None))  # which the next write of the same process replaces
        written.append(segment(draw, rows=draw.randint(1, 40), **({"end": None} if number == 2 else {})))
        file.write(written[-1])
        found = read_trace(trace_path(str(out)))
        assert found.segments == written and not found.notes, f"seed {seed}"


def test_a_trace_has_the_permissions_of_out(out):
    """Fault: whoever may not read the answers reads the first words of the prompts."""
    out.chmod(0o600)
    opened(out).write(segment(random.Random(0)))
    assert Path(trace_path(str(out))).stat().st_mode & 0o777 == 0o600
    out.chmod(0o640)
    opened(out).write(segment(random.Random(0)))
    assert Path(trace_path(str(out))).stat().st_mode & 0o777 == 0o640


def test_the_oldest_segments_go_when_the_file_is_full(out, monkeypatch):
    """Fault: a trace grows with every --resume, or what goes is the newest, or nobody is told."""
    draw = random.Random(0)
    one = segment(draw, rows=50)
    monkeypatch.setattr(trace_file, "MAX_BYTES", 3 * len(orjson.dumps(one)) + 200)
    for number in range(9):
        opened(out).write(replace(one, worker=str(number)))
        assert os.path.getsize(trace_path(str(out))) <= trace_file.MAX_BYTES
    found = read_trace(trace_path(str(out)))
    assert [segment.worker for segment in found.segments] == ["6", "7", "8"]
    assert any("older segments, which were dropped" in note for note in found.notes)


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"format":1}\n', b"\x00\xff", b'{"role":"user"}\n', b"[1]"])
def test_a_file_that_is_no_trace_stays(out, content):
    """Fault: a run replaces a file of somebody else's that has the trace's name."""
    path = Path(trace_path(str(out)))
    path.write_bytes(content)
    file = TraceFile(out, out, Disk())
    with pytest.raises(UsageError, match="is not a trace of this program.*--no-trace"):
        file.check_replaceable()
    file.remove()
    assert path.read_bytes() == content
    with pytest.raises(TraceError, match="is not a trace of this program"):
        read_trace(path)


def test_what_is_no_file_is_refused_in_a_sentence(out):
    """Fault: a named pipe is waited for, a folder ends in a traceback."""
    path = Path(trace_path(str(out)))
    with pytest.raises(TraceError, match="is missing; `apcbatch run` writes it, unless --no-trace is given"):
        read_trace(path)
    os.mkfifo(path)
    with pytest.raises(TraceError, match="cannot be read: it is a named pipe; expected a regular file"):
        read_trace(path)
    with pytest.raises(UsageError, match="is not a trace"):
        TraceFile(out, out, Disk()).check_replaceable()
    path.unlink()
    path.mkdir()
    with pytest.raises(TraceError, match="cannot be read: it is a folder"):
        read_trace(path)


def test_segments_of_another_version_stay_and_are_told(out):
    """Fault: --resume throws away what a later version has written, or a report ends because of it."""
    path = Path(trace_path(str(out)))
    later = b'{"format":2,"segment":{"anything":[1]}}'
    path.write_bytes(later + b"\n")
    with pytest.raises(TraceError, match="segment 1 of .* cannot be read: it has the format 2; this version reads 1"):
        read_trace(path)
    one = segment(random.Random(1))
    opened(out).write(one)
    assert path.read_bytes().splitlines()[0] == later
    found = read_trace(path)
    assert found.segments == [one] and "it has the format 2" in found.notes[0]


def test_torn_lines_are_dropped_with_a_word(out):
    """Fault: one damaged line makes the whole trace unreadable, or it is dropped in silence."""
    one, warned = segment(random.Random(2)), []
    opened(out).write(one)
    path = Path(trace_path(str(out)))
    path.write_bytes(path.read_bytes() + b'{"format":1,"segm')
    found = read_trace(path)
    assert found.segments == [one] and "segment 2" in found.notes[0] and "it is no JSON" in found.notes[0]
    opened(out, warned).write(one)
    assert warned == [f"1 lines of {path} are no segments of a trace; they are dropped"]
    assert read_trace(path).segments == [one, one]


def damaged(draw: random.Random, found: dict) -> dict:
    """The object of a line with one thing changed, somewhere in its segment."""
    found = copy.deepcopy(found)
    segment = found["segment"]
    place = draw.choice([segment, segment["passes"], segment["stems"], segment["end"]])
    name = draw.choice(list(place))
    kind = draw.randrange(3)
    if kind == 0:
        del place[name]
    elif kind == 1 or not isinstance(place[name], list) or not place[name]:
        place[name] = draw.choice([None, -2, "x", [], {}, 1e300, [None], 10**30, True])
    else:
        place[name][draw.randrange(len(place[name]))] = draw.choice([None, -5, "x", [], {}, 1e308, 10**30, True])
    return found


def test_damage_is_a_sentence_or_harmless(out):
    """Fault: a trace that was written by hand, or damaged, ends in a traceback, or in columns of two lengths."""
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    path = Path(trace_path(str(out)))
    opened(out).write(segment(draw))
    whole = orjson.loads(path.read_bytes())
    refused = 0
    for number in range(500):
        path.write_text(json.dumps(damaged(draw, whole)))
        try:
            [found] = read_trace(path).segments
        except TraceError as error:
            assert "cannot be read: " in str(error)
            refused += 1
            continue
        for table in (found.passes, found.stems):
            assert len({len(getattr(table, field.name)) for field in fields(table)}) == 1, (seed, number)
        stems = found.stems
        for row, parent in enumerate(stems.parent):
            assert -1 <= parent < row and stems.begin[row] == (stems.end[parent] if row else 0), (seed, number)
    assert refused > 250, f"seed {seed}: most damage is noticed"


@pytest.mark.parametrize("seconds", [1e308, 2.0**40 + 1])
def test_a_number_that_no_clock_has_is_refused(out, seconds):
    """Fault: sums of a trace that somebody made up are infinite, and the report ends in a traceback."""
    opened(out).write(segment(random.Random(0), begin=seconds))
    with pytest.raises(TraceError, match="its begin or its machine is not what was expected"):
        read_trace(trace_path(str(out)))
