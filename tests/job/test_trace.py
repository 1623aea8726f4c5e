"""The trace that `run` writes beside OUT: segments, sums, what it must not touch."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import stat
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from apcbatch.engine.observer import KeptSnapshot
from apcbatch.job.disk import Disk
from apcbatch.job.tracing import recorder as trace_module
from apcbatch.job.tracing.segment import Segment
from apcbatch.job.tracing.trace_file import read_trace
from apcbatch.resolution import resolve
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers
from tests.job.fakes import FakeEngine

RUN = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 4, "--max-running", 3, "--progress", "none")


@pytest.fixture
def trace(tmp_path):
    return tmp_path / "out.jsonl.trace.jsonl"


@pytest.fixture
def chats(tmp_path):
    """40 requests, and a line that cannot be read."""
    return write_lines(tmp_path / "in.jsonl", [*(conversation(number) for number in range(20)), "{"])


def agrees(segment: Segment, summary: dict) -> None:
    """The sums of a segment are those of the summary."""
    stems, passes = segment.edges, segment.passes
    assert segment.end is not None and segment.end.summary == summary
    assert sum(stems.restored) == summary["cached_tokens"]
    assert sum(stems.computed) == summary["computed_tokens"]
    assert {"memory": sum(stems.memory), "disk": sum(stems.disk)} == summary["cached_by_source"]
    assert stems.requests[0] == summary["ok"]
    assert sum(passes.failures) == summary["errors"]
    for row, seconds in enumerate(passes.seconds):
        assert passes.prefill_s[row] + passes.decode_s[row] + passes.store_s[row] <= seconds + 1e-5


def test_a_run_leaves_one_segment(apcbatch, chats, trace):
    """Fault: there is no trace, it says something else than the summary, or not what was run."""
    done = apcbatch(*RUN, "--block-size", 16)
    assert done.code == 3
    [segment] = read_trace(trace).segments
    agrees(segment, done.summary)
    assert segment.end.exit_code == 3 and segment.continue_command is None
    assert "nothing is left to do" in done.final_line
    assert segment.input == "in.jsonl" and segment.worker == "main" and segment.fingerprint == "f" * 64
    assert segment.program[1:5] == list(RUN[:4]), segment.program
    assert segment.program[segment.program.index("--block-size") :][:2] == ["--block-size", "16"]
    assert ("block_size", 16, "--block-size") in segment.options and ("seed", 0, "default") in segment.options
    assert any("number" in text for text in segment.edges.text), "a stem's first words are there"
    assert stat.S_IMODE(os.stat(trace).st_mode) == stat.S_IMODE(os.stat(trace.with_name("out.jsonl")).st_mode)


def test_each_resume_adds_a_segment(apcbatch, chats, trace, tmp_path):
    """Fault: what was traced before a stop is gone after --resume, or stays after --overwrite."""
    first = apcbatch(*RUN, "--limit", 5)
    second = apcbatch(*RUN, "--resume")
    found = read_trace(trace).segments
    assert len(found) == 2
    agrees(found[0], first.summary)
    agrees(found[1], second.summary)
    assert found[1].program[-1] == "--resume" and second.summary["already_done"] == 10
    fresh = apcbatch(*RUN, "--overwrite")
    [segment] = read_trace(trace).segments
    agrees(segment, fresh.summary)
    assert segment.program[-1] == "--overwrite"


@pytest.mark.slow
def test_killed_and_resumed(start, apcbatch, tmp_path, trace):
    """Fault: a kill -9 costs the whole picture, or leaves one that --resume cannot go on from."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(40)])
    assert apcbatch("run", "in.jsonl", "-o", "whole.jsonl", "--max-tokens", 4, "--no-trace").code == 0
    process = start(*RUN, FAKE_HOLD_AT=70)
    process.wait_for_lines(tmp_path / "out.jsonl", 70)
    process.wait_for_lines(trace, 1)
    process.send(signal.SIGKILL)
    assert process.end().code == -signal.SIGKILL
    [killed] = read_trace(trace).segments
    written = len((tmp_path / "out.jsonl").read_bytes().splitlines())
    assert killed.end is None and 0 < killed.edges.requests[0] <= written
    assert {"run", "in.jsonl", "out.jsonl", "--resume"} <= set(shlex.split(killed.continue_command))
    assert "--retry-errors" not in killed.continue_command, "there is no error yet"
    last = start(*RUN, "--resume").end()
    assert last.code == 0, last.stderr
    found = read_trace(trace).segments
    assert found[0] == killed
    agrees(found[1], last.summary)
    assert answers(read_records(tmp_path / "out.jsonl")) == answers(read_records(tmp_path / "whole.jsonl"))


def without_times(path) -> list[dict]:
    """The records, without what differs from run to run."""
    records = read_records(path)
    for record in records:
        for name in ("prefill_ms", "decode_ms", "drafted_tokens", "accepted_tokens"):
            if record["error"] is None:
                del record["apcbatch"][name]
        if record["response"]:
            del record["response"]["body"]["created"]
    return records


def test_no_trace_leaves_nothing_and_changes_nothing(apcbatch, chats, trace, tmp_path, engines):
    """Fault: --no-trace keeps the prompts' words all the same, or a trace changes OUT."""
    apcbatch(*RUN)
    traced = without_times(tmp_path / "out.jsonl")
    assert trace.exists() and engines[-1].observer is not None
    plain = apcbatch(*RUN, "--overwrite", "--no-trace")
    assert plain.code == 3 and engines[-1].observer is None
    assert not trace.exists(), "the trace of answers that were replaced goes with them"
    assert without_times(tmp_path / "out.jsonl") == traced
    again = apcbatch(*RUN, "--resume", "--trace")
    assert not trace.exists() and again.summary["requests"] == 0


def test_no_trace_is_an_option_like_others(apcbatch, chats, trace, monkeypatch):
    """Fault: it cannot be set in the environment, or the command that continues traces again."""
    monkeypatch.setenv("APCBATCH_TRACE", "false")
    done = apcbatch(*RUN, "--strict")
    assert done.code == 1 and "--no-trace" in done.final_line and not trace.exists()
    done = apcbatch(*RUN, "--overwrite", "--strict", "--trace")
    assert "--trace" in done.final_line.split() and trace.exists()
    shown = apcbatch("run", "--show-config")
    assert "trace: false" in shown.stdout and "# APCBATCH_TRACE" in shown.stdout


def test_standard_output_has_no_trace(apcbatch, chats, tmp_path):
    """Fault: a run to a stream leaves files, or fails because it has no place for one."""
    assert apcbatch("run", "in.jsonl", "-o", "-", "--max-tokens", 1).code == 3
    assert apcbatch("run", "in.jsonl", "-o", "/dev/null", "--max-tokens", 1).code == 3
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl"] and not os.path.exists("/dev/null.trace.jsonl")


def test_a_packed_out_has_it_too(apcbatch, chats, tmp_path):
    """Fault: the trace is called after the file of plain lines, which is gone at the end."""
    done = apcbatch("run", "in.jsonl", "-o", "out.gz", "--max-tokens", 1)
    [segment] = read_trace(tmp_path / "out.gz.trace.jsonl").segments
    agrees(segment, done.summary)
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.parametrize("mode", [(), ("--overwrite",), ("--resume",)])
def test_a_file_of_that_name_that_is_none_of_ours_stays(apcbatch, chats, trace, mode):
    """Fault: a run replaces somebody's file because it has the trace's name, or has computed before it says so."""
    if mode:
        assert apcbatch(*RUN, "--limit", 1).code == 0
    trace.write_text("mine")
    done = apcbatch(*RUN, *mode)
    assert done.code == 2 and "is not a trace of this program" in done.stderr and "--no-trace" in done.stderr
    assert trace.read_text() == "mine"
    assert apcbatch(*RUN, *mode, "--no-trace").code == 3 and trace.read_text() == "mine"


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "in.jsonl", "-o", "out.jsonl", "--summary", "out.jsonl.trace.jsonl"),
        ("run", "out.jsonl.trace.jsonl", "-o", "out.jsonl"),
    ],
)
def test_no_other_file_of_the_command_may_have_its_name(apcbatch, chats, trace, tmp_path, arguments):
    """Fault: the trace overwrites INPUT or --summary."""
    os.link(tmp_path / "in.jsonl", trace)
    before = trace.read_bytes()
    done = apcbatch(*arguments)
    assert done.code == 2 and "OUT.trace.jsonl are the same file" in done.stderr
    assert trace.read_bytes() == before


def test_a_folder_is_read_without_it(apcbatch, tmp_path):
    """Fault: a second run over a folder answers the trace of the first."""
    (tmp_path / "shards").mkdir()
    write_lines(tmp_path / "shards" / "a.jsonl", [conversation(1)])
    command = ("run", "shards", "-o", "shards/out.jsonl", "--max-tokens", 1)
    assert apcbatch(*command).summary["requests"] == 2
    again = apcbatch(*command, "--overwrite")
    assert again.code == 0 and again.summary["requests"] == 2
    assert "not out.jsonl, out.jsonl.run.json, out.jsonl.trace.jsonl" in again.stderr


def test_a_disk_that_refuses_it_ends_nothing(apcbatch, chats, trace, monkeypatch):
    """Fault: a full disk, or a folder that may not be written to, ends a run because of its trace; each try warns."""
    rename = Disk.rename
    monkeypatch.setattr(trace_module, "FIRST_WRITE_S", 0.0)
    monkeypatch.setattr(trace_module, "WRITE_EVERY_S", 0.0)
    monkeypatch.setattr(trace_module, "TIMES_ITS_COST", 0)

    def refused(self, source, target):
        if target.endswith(".trace.jsonl"):
            raise OSError(28, "No space left on device")
        rename(self, source, target)

    monkeypatch.setattr(Disk, "rename", refused)
    done = apcbatch(*RUN)
    assert done.code == 3 and done.summary["ok"] == 40
    assert done.stderr.count("out.jsonl.trace.jsonl cannot be written: No space left on device") == 1
    assert not trace.exists() and not list(trace.parent.glob(".apcbatch-*"))


def test_a_file_that_appears_during_a_run_stays(apcbatch, chats, trace, monkeypatch):
    """Fault: what another program puts there while the run goes on, be it a trace, is replaced."""
    assert apcbatch(*RUN).code == 3
    theirs, flush = trace.read_bytes() + b"mine\n", FakeEngine.flush

    def appears(self):
        trace.unlink(missing_ok=True)
        trace.write_bytes(theirs)
        flush(self)

    monkeypatch.setattr(FakeEngine, "flush", appears)
    done = apcbatch(*RUN, "--overwrite")
    assert done.code == 3 and trace.read_bytes() == theirs
    assert done.stderr.count("another program has put a file there while this run went on") == 1


def made_trace(file, elapsed_s=lambda: 0.0, **options):
    """A trace of no run, written to this file."""
    engine = SimpleNamespace(fingerprint="f", dtype="float32", device="cpu")
    given = {"program": ["run"], "warn": pytest.fail} | options
    command = (resolve({}, {}, {}, ""), given["program"], "in", "go on")
    return trace_module.RunTrace(file, engine, *command, decode=str, elapsed_s=elapsed_s, warn=given["warn"])


def test_writes_become_rarer(monkeypatch):
    """Fault: a run of hours writes its trace every two seconds, or the picture of a killed one is minutes old."""
    monkeypatch.setattr(trace_module, "TIMES_ITS_COST", 0)
    now, written = [0.0], []
    file = SimpleNamespace(path="t", write=lambda segment: written.append(now[0]))
    trace = made_trace(file, lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        trace.write_if_due()
        trace.close()
    assert written == [2, 6, 14, 30, 60, 90]


def test_writing_takes_a_bounded_share_of_the_time(monkeypatch):
    """Fault: a trace that is dear to write takes a quarter of the run, or a cheap one waits for the processor."""
    monkeypatch.setattr(trace_module, "TIMES_ITS_COST", 10)
    monkeypatch.setattr(trace_module, "FIRST_WRITE_S", 0.0)
    monkeypatch.setattr(trace_module, "WRITE_EVERY_S", 0.0)
    spent, written = [50.0], []
    monkeypatch.setattr(trace_module.time, "thread_time", lambda: spent[0])

    def write(segment):
        written.append(spent[0])
        spent[0] += 2.0

    trace, columns = made_trace(SimpleNamespace(path="t", write=write)), trace_module.edge_columns

    def gathered(*given):
        spent[0] += 1.0
        return columns(*given)

    monkeypatch.setattr(trace_module, "edge_columns", gathered)
    for now in (50.0, 61.0, 71.0, 80.9, 81.0, 111.9):  # gathered until 51, and 3 spent in all
        spent[0] = now
        trace.write_if_due()
        trace.close()
    assert written == [51.0, 82.0]


def test_a_write_that_goes_on_is_not_waited_for(monkeypatch):
    """Fault: a slow disk holds up the engine, or the last segment is written beside an earlier one."""
    monkeypatch.setattr(trace_module, "FIRST_WRITE_S", 0.0)
    calls = []
    trace = made_trace(SimpleNamespace(path="t", write=lambda segment: calls.append(segment.end is None)))
    busy = SimpleNamespace(is_busy=True, finish=lambda: calls.append("waited"))
    monkeypatch.setattr(trace, "_background", busy)
    trace.write_if_due()
    assert calls == []
    trace.end(0, None, {"ok": 1})
    assert calls == ["waited", False]


def test_an_eviction_has_its_time():
    """Fault: the page shows an eviction at the begin of the run, or one of a snapshot that was let go."""
    now, written = [0.0], []
    trace = made_trace(SimpleNamespace(path="t", write=written.append), lambda: now[0])
    for number, (kept_s, in_memory) in enumerate([(1.0, True), (2.0, True), (3.0, False)]):
        now[0] = kept_s
        tokens = np.arange(number, number + 4, dtype=np.int32)
        trace.kept(tokens, [KeptSnapshot(bytes([number]), 4, 1, in_memory)])
    now[0] = 500.0
    trace.write_if_due()
    trace.close()
    edges = written[0].edges
    assert (edges.snapshots, edges.dropped, edges.dropped_s) == ([3], [1], [3.0])
    for now[0], key, evicted in ((7.5, 0, True), (9.5, 1, False)):
        trace.dropped(bytes([key]), evicted)
    trace.end(0, None, {"ok": 1})
    edges = written[-1].edges
    assert (edges.snapshots, edges.dropped, edges.dropped_s) == ([3], [2], [7.5])


def test_a_long_command_is_shortened():
    """Fault: a word is dropped without a sign, or the sign stands for none; a text is cut that is short enough."""
    for count, more in [(255, []), (256, []), (257, ["... 1 more"]), (300, ["... 44 more"])]:
        words = [f"w{number}" for number in range(count)]
        assert trace_module._shortened(words) == words[:256] + more
    texts = trace_module._shortened(["x" * 4096, "x" * 4097, "\udcff"])
    assert texts == ["x" * 4096, "x" * 4096 + "...", "?"]
    assert trace_module._plain({"a": ["\udcff", 1, None], "b": "x" * 5000}, None) == {
        "a": ["?", 1, None], "b": "x" * 5000,
    }  # fmt: skip


def test_the_machine_is_described_by_what_is_known(monkeypatch):
    """Fault: the page of a run names a GPU that it did not use, or nothing that it did."""
    import torch

    from apcbatch.kernels import processor

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(trace_module.os, "sysconf", lambda name: {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}[name])
    cpu, cuda = (trace_module.describe_machine(device) for device in ("cpu", "cuda"))
    assert (cpu["gpu"], cuda["gpu"], cpu["torch"]) == (None, "a GPU", torch.__version__)
    assert (cpu["threads"], cpu["instructions"]) == (torch.get_num_threads(), processor.isa())
    assert cpu["memory_bytes"] == 3 * 4096 and cpu["cores"] == len(os.sched_getaffinity(0))
    for name in ("torch", "apcbatch.kernels.processor"):
        monkeypatch.delitem(sys.modules, name)
    bare = trace_module.describe_machine("cuda")
    assert [bare[name] for name in ("gpu", "torch", "threads", "instructions")] == [None] * 4


@pytest.mark.parametrize(
    ("content", "name"),
    [("model: 1\nmodel name\t: A: 1\nmodel name\t: B\n", "A: 1"), ("vendor: x\n", "P"), (None, "P")],
)
def test_the_processor_has_a_name(monkeypatch, content, name):
    """Fault: a machine whose /proc/cpuinfo has no name, or that has none, ends the run."""

    def read_text(self):
        if content is None:
            raise FileNotFoundError
        return content

    monkeypatch.setattr(trace_module.Path, "read_text", read_text)
    monkeypatch.setattr(trace_module.platform, "processor", lambda: "P")
    assert trace_module.processor() == name


def test_writing_often_leaves_the_same_trace(apcbatch, chats, trace, monkeypatch):
    """Fault: what is written on the way changes what is gathered, or a reader finds half a file."""
    apcbatch(*RUN)
    [rarely] = read_trace(trace).segments
    monkeypatch.setattr(trace_module, "FIRST_WRITE_S", 0.0)
    monkeypatch.setattr(trace_module, "WRITE_EVERY_S", 0.0)
    monkeypatch.setattr(trace_module, "TIMES_ITS_COST", 0)
    seen, rename = [], Disk.rename

    def watched(self, source, target):
        rename(self, source, target)
        if target == str(trace):
            seen.extend(read_trace(trace).segments)

    monkeypatch.setattr(Disk, "rename", watched)
    apcbatch(*RUN, "--overwrite")
    assert len(seen) > 10 and [segment.end is None for segment in seen] == [True] * (len(seen) - 1) + [False]
    assert seen[-1].edges == rarely.edges
    assert [segment.edges.requests[0] for segment in seen] == sorted(segment.edges.requests[0] for segment in seen)


def test_secrets_and_long_words_stay_out(apcbatch, chats, trace):
    """Fault: the salt is in the trace, or a command of a megabyte is."""
    long = "x" * 100_000
    apcbatch(*RUN, "--cache-salt", "kHj4-zebra", "--template-kwargs", json.dumps({"a": long}), "--store", "states")
    text = trace.read_text()
    assert "zebra" not in text and long[:5000] not in text and "xxxx..." in text
    [segment] = read_trace(trace).segments
    assert dict((name, value) for name, value, _ in segment.options)["cache_salt"] is None
    assert "@FILE" in segment.program


def test_many_requests_stay_within_the_bounds(apcbatch, tmp_path, trace, monkeypatch):
    """Fault: the rows of the file grow with the input."""
    monkeypatch.setattr(trace_module, "edge_columns", lambda root, decode: rows(root, decode, 50))
    from apcbatch.job.tracing.edge_rows import edge_columns as rows

    seed = random.randrange(10**6)
    draw = random.Random(seed)
    write_lines(tmp_path / "in.jsonl", [conversation(draw.randrange(10**6)) for _ in range(300)])
    done = apcbatch(*RUN, "-q")
    [segment] = read_trace(trace).segments
    assert len(segment.edges.parent) <= 50 and sum(segment.edges.hidden) > 0, seed
    agrees(segment, done.summary)


@pytest.mark.slow
def test_names_that_are_no_utf8(start, tmp_path):
    """Fault: the command that continues cannot be written as JSON, and the trace ends a run that has its answers."""
    name, out = os.fsdecode(b"in\xff.jsonl"), os.fsdecode(b"out\xff.jsonl")
    write_lines(tmp_path / name, [conversation(1), "{", conversation(2)])
    done = start("run", name, "-o", out, "--strict").end()
    assert done.code == 1 and "internal error" not in done.stderr
    (segment,) = read_trace(tmp_path / f"{out}.trace.jsonl").segments
    assert segment.end is not None and segment.end.exit_code == 1
    assert r"$'out\xff.jsonl'" in segment.continue_command, "which a shell reads as that name"
