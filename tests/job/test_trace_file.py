"""OUT.trace.jsonl as a file: what is read back, what is refused, what goes when it is full."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import re
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import orjson
import pytest

from apcbatch.errors import UsageError
from apcbatch.job.disk import Disk
from apcbatch.job.tracing import trace_file
from apcbatch.job.tracing.segment import MAX_PASS_ROWS, EdgeColumns, End, PassColumns, Segment, _tree, line_of
from apcbatch.job.tracing.trace_file import TraceError, TraceFile, read_trace, trace_path
from tests.effort import tries

COUNTS = ("requests", "restored", "computed", "memory", "disk", "snapshots", "snapshot_bytes", "dropped", "hidden")


def segment(draw: random.Random, rows: int = 5, **changes) -> Segment:
    """A random one."""
    passes = PassColumns(*([draw.randint(0, 9) for _ in range(rows)] for _ in fields(PassColumns)))
    parent = [-1, *(draw.randrange(row) for row in range(1, rows))]
    end = [0]
    for above in parent[1:]:
        end.append(end[above] + draw.randint(0, 9))
    counts = {name: [draw.randrange(1000) for _ in range(rows)] for name in COUNTS}
    begin = [end[max(0, above)] for above in parent]
    text = [draw.choice(["", "a b", "</script>\u2028\x00\n", "é🙂"]) for _ in range(rows)]
    dropped_s = [draw.choice([None, 1.5]) for _ in range(rows)]
    stems = EdgeColumns(parent=parent, begin=begin, end=end, text=text, dropped_s=dropped_s, **counts)
    texts = {name: draw.choice(["x", "é"]) for name in ("version", "worker", "input", "model", "fingerprint")}
    facts = {"dtype": "float32", "device": "cpu", "machine": {"cpu": None, "cores": 2}, "begin": 12.5}
    options = [("block_size", 64, "default"), ("stop", ["a"], "--stop")]
    facts |= {"program": ["a", "b"], "options": options, "continue_command": draw.choice([None, "apcbatch run"])}
    whole = Segment(**texts, **facts, passes=passes, edges=stems, end=End(1.5, 3, {"requests": 1}))
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
    draw, written = random.Random(random.random()), []
    for number in range(5):
        file = opened(out)
        file.write(segment(draw, end=None))  # which the next write of the same process replaces
        written.append(segment(draw, rows=draw.randint(1, 40), **({"end": None} if number == 2 else {})))
        file.write(written[-1])
        found = read_trace(trace_path(str(out)))
        assert found.segments == written and not found.notes


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


def test_a_segment_stays_while_there_is_room_for_it(out, monkeypatch):
    """Fault: a segment that fits to the byte is dropped, or the file has a byte more than its bound."""
    opened(out).write(one := segment(random.Random(0)))
    path = Path(trace_path(str(out)))
    whole = path.stat().st_size + len(line_of(one, 1))
    before = path.read_bytes()
    for room, kept in ((whole, 2), (whole - 1, 1)):
        monkeypatch.setattr(trace_file, "MAX_BYTES", room)
        path.write_bytes(before)
        opened(out).write(one)
        assert len(read_trace(path).segments) == kept and path.stat().st_size <= room


def test_a_trace_is_removed_for_good(out, monkeypatch):
    """Fault: the trace of answers that are gone is back after a power cut, or one that stays ends in a traceback."""
    opened(out).write(segment(random.Random(0)))
    path, done = trace_path(str(out)), []

    def refused(self, path):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "unlink", refused)
        with pytest.raises(UsageError, match=f"^{re.escape(path)} cannot be removed: Permission denied; choose anothe"):
            opened(out).remove()
    unlink = Disk.unlink
    monkeypatch.setattr(Disk, "unlink", lambda self, name: (done.append(name), unlink(self, name)))
    monkeypatch.setattr(Disk, "sync_folder", lambda self, folder: done.append((folder, os.path.exists(path))))
    opened(out).remove()
    assert done == [path, (str(out.parent), False)]


@pytest.mark.parametrize("theirs", [b"", b"x" * 100_000])
def test_a_file_that_another_program_writes_is_not_replaced(out, theirs):
    """Fault: what another program has written there, be it shorter or longer, goes with the next write."""
    file = opened(out)
    file.write(segment(random.Random(0)))
    path = Path(trace_path(str(out)))
    path.write_bytes(theirs)
    with pytest.raises(FileExistsError, match="another program has put a file there while this run went on"):
        file.write(segment(random.Random(0)))
    assert path.read_bytes() == theirs
    path.unlink()
    file.write(segment(random.Random(0)))
    assert len(read_trace(path).segments) == 1


def test_each_missing_part_is_one_sentence(out):
    """Fault: a part that is not shown is not told, or a trace that is whole is said to lack some."""
    path, one = Path(trace_path(str(out))), segment(random.Random(3))
    opened(out).write(one)
    whole = path.read_bytes()
    for changes, note in [
        ({"format": 0}, "cannot be read: it has the format 0; this version reads 1"),
        ({"format": "x" * 30}, f"cannot be read: it has the format {'x' * 20}; this version reads 1"),
        ({"segment": {}}, "cannot be read: it has no version"),
        ({"missing": 3}, f"had 3 older segments, which were dropped to stay below {trace_file.MAX_BYTES:,} bytes"),
        ({"missing": 0}, None),
        ({"missing": -1}, None),
        ({"missing": "x"}, None),
    ]:
        path.write_bytes(whole + orjson.dumps(orjson.loads(whole) | changes) + b"\n")
        found = read_trace(path)
        assert found.segments == [one] * (1 if note and "cannot" in note else 2), changes
        assert [one.endswith(note) for one in found.notes] == ([True] if note else []), changes


def test_a_file_that_is_no_trace_stays(out):
    """Fault: a run replaces a file of somebody else's that has the trace's name."""
    for content in [b"", b"{}\n", b'{"format":1}\n', b"\x00\xff", b'{"role":"user"}\n', b"[1]"]:
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
    path, count, draw = Path(trace_path(str(out))), tries(2000), random.Random(random.random())
    opened(out).write(segment(draw))
    whole = orjson.loads(path.read_bytes())
    refused = 0
    for number in range(count):
        path.write_text(json.dumps(damaged(draw, whole)))
        try:
            [found] = read_trace(path).segments
        except TraceError as error:
            assert "cannot be read: " in str(error)
            refused += 1
            continue
        for table in (found.passes, found.edges):
            assert len({len(getattr(table, field.name)) for field in fields(table)}) == 1, number
        stems = found.edges
        for row, parent in enumerate(stems.parent):
            assert -1 <= parent < row and stems.begin[row] == (stems.end[parent] if row else 0), number
    assert refused > count / 2, "most damage is noticed"


FIELDS = [
    ((), "continue", 5, False), ((), "continue", None, True), ((), "version", 5, False),
    ((), "machine", None, False), ((), "begin", -1, False), ((), "begin", 0, True), ((), "begin", 2.0**40, True),
    ((), "begin", True, False), ((), "program", "run", False), ((), "program", [5], False), ((), "end", None, True),
    ((), "options", [["a", 1]], False), ((), "options", [[1, 1, "x"]], False), ((), "options", ["abc"], False),
    (("end",), "seconds", -1, False), (("end",), "exit_code", -1, False), (("end",), "exit_code", 0, True),
    (("end",), "summary", [], False), (("stems",), "hidden", [2**63 - 1], True),
    (("stems",), "hidden", [0], True), (("stems",), "hidden", [2**63], False), (("stems",), "hidden", [-1], False),
    (("stems",), "hidden", [1.0], False), (("stems",), "hidden", [], False), (("stems",), "parent", [0], False),
    (("stems",), "parent", [-2], False),
    (("stems",), "begin", [1], False), (("stems",), "end", [1], False), (("stems",), "text", [5], False),
    (("stems",), "dropped_s", [None], True), (("stems",), "dropped_s", [0], True),
    (("stems",), "dropped_s", [-1], False),
]  # fmt: skip


def test_each_field_is_checked(out):
    """Fault: a value of another type, or one beyond its range, reaches the report."""
    path = Path(trace_path(str(out)))
    opened(out).write(segment(random.Random(0), rows=1))
    line = path.read_bytes()
    for place, name, value, is_read in FIELDS:
        whole = orjson.loads(line)
        found = whole["segment"]
        for key in place:
            found = found[key]
        assert name in found
        found[name] = value
        path.write_bytes(orjson.dumps(whole))
        try:
            assert len(read_trace(path).segments) == is_read == 1, (place, name, value)
        except TraceError as error:
            assert not is_read and "cannot be read" in str(error), (place, name, value)


@pytest.mark.parametrize(("rows", "is_read"), [(0, True), (MAX_PASS_ROWS, True), (MAX_PASS_ROWS + 1, False)])
def test_rows_are_read_up_to_their_bound(out, rows, is_read):
    """Fault: a trace that somebody made up fills the memory of the report, or a long run's own is refused."""
    one = segment(random.Random(0), rows=3)
    passes = PassColumns(*([0] * rows for _ in fields(PassColumns)))
    opened(out).write(replace(one, passes=passes))
    with nullcontext() if is_read else pytest.raises(TraceError, match=f"expected one number up to {MAX_PASS_ROWS}"):
        assert read_trace(trace_path(str(out))).segments[0].passes == passes


@pytest.mark.parametrize("seconds", [1e308, 2.0**40 + 1])
def test_a_number_that_no_clock_has_is_refused(out, seconds):
    """Fault: sums of a trace that somebody made up are infinite, and the report ends in a traceback."""
    opened(out).write(segment(random.Random(0), begin=seconds))
    with pytest.raises(TraceError, match="its begin or its machine is not what was expected"):
        read_trace(trace_path(str(out)))


def test_rows_that_are_no_tree_are_refused(out):
    """Fault: a row above itself, before its parent, or that begins elsewhere than its parent ends, is drawn."""
    for changes in [
        {"parent": [-1, 1, 0]},
        {"parent": [-1, 2, 0]},
        {"parent": [-1, -1, 0]},
        {"parent": [0, 0, 0]},
        {"begin": [1, 0, 4]},
        {"begin": [0, 1, 4]},
        {"begin": [0, 0, 4], "end": [0, 5, 3]},
        {"begin": [0, 0, 0], "end": [1, 5, 9]},
    ]:
        sound = {"parent": [-1, 0, 0], "begin": [0, 0, 0], "end": [0, 5, 9]}
        edges = segment(random.Random(0), rows=3).edges
        assert _tree(replace(edges, **sound)).end == [0, 5, 9]
        with pytest.raises(ValueError, match=r"row \d of its stems has no place in the tree"):
            _tree(replace(edges, **(sound | changes)))
