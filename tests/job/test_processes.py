"""The entries of processes in the run file, and the times in the records: what each process did, and how it ended."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from apcbatch import cores
from apcbatch.errors import StoppedError
from apcbatch.job import processes, runfile
from apcbatch.job.disk import Disk
from apcbatch.job.processes import bounded, continuing, make_end, plain, process_of
from apcbatch.job.sink import FileSink
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import Outcome, processes_of
from tests.job.fakes import FakeEngine

RUN = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 4, "--max-running", 3, "--progress", "none")
Command = Callable[..., Outcome]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """OUT of a run over 40 requests and a line that cannot be read."""
    write_lines(tmp_path / "in.jsonl", [*(conversation(number) for number in range(20)), "{"])
    return tmp_path / "out.jsonl"


def test_each_process_has_an_entry(apcbatch: Command, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an entry that is not the summary's, has another exit status or command, or is gone after --resume; one
    that stays after --overwrite."""
    append, left = FileSink.append, [12]

    def stops(self: FileSink, line: bytes) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise StoppedError("the disk is gone")
        append(self, line)

    monkeypatch.setattr(FileSink, "append", stops)
    assert apcbatch(*RUN, "--block-size", 16).code == 1
    [stopped] = processes_of(out)
    assert stopped.end is not None and (stopped.end.exit_code, stopped.end.summary["requests"]) == (1, 11)
    for words, code, is_done in (
        (("--resume", "--limit", 10), 0, True),
        (("--resume", "--strict"), 1, False),
        (("--resume",), 3, True),
        (("--resume",), None, True),  # nothing is left to do, and nothing ran
        (("--overwrite", "--cache-salt", "kHj4-zebra"), 3, True),
    ):
        before = [] if "--overwrite" in words else processes_of(out)
        done = apcbatch(*RUN, *words)
        found = processes_of(out)
        if code is None:
            assert found == before
            continue
        assert found[:-1] == before, "earlier entries stay as they are"
        last = found[-1]
        assert last.end is not None and last.end.exit_code == done.code == code
        assert last.end.summary == done.summary and last.end.seconds >= done.summary["seconds"]["total"]
        assert last.continue_command == (None if is_done else done.final_line)
        given = f"{' '.join(map(str, RUN))} {' '.join(map(str, words))}"
        command = last.command.partition("apcbatch")[2] or last.command
        assert all(word in last.command.split() for word in given.split() if word != "kHj4-zebra"), command
        assert {name for name, _, _ in last.options} >= {"max_tokens", "policy"} and last.input == "in.jsonl"
        assert all(origin != "default" for _, _, origin in last.options)
    assert "zebra" not in (out.parent / "out.jsonl.run.json").read_text()


@pytest.mark.slow
def test_a_killed_process_has_no_end(start: Callable[..., Any], out: Path) -> None:
    """Fault: a process that was killed looks as if it had ended, or --resume loses it."""
    process = start(*RUN, FAKE_HOLD_AT=9)
    process.wait_for_lines(out, 9)
    process.send(signal.SIGKILL)
    assert process.end().code == -signal.SIGKILL
    [killed] = processes_of(out)
    assert killed.end is None and killed.continue_command is not None and killed.continue_command.endswith(" --resume")
    written = len(read_records(out))
    last = start(*RUN, "--resume").end()
    assert last.code == 3, last.stderr
    first, second = processes_of(out)
    assert first == killed and second.end is not None and second.end.summary == last.summary
    records = read_records(out)
    own = [record["apcbatch"] for record in records]
    begins_s = second.begin - first.begin
    assert all(one["end_s"] <= begins_s for one in own[:written])
    assert all(begins_s <= one["end_s"] <= begins_s + second.end.seconds for one in own[written:])


def test_records_have_their_times(apcbatch: Command, out: Path) -> None:
    """Fault: a time before the begin, an end before it, or times of a resumed process that begin at 0 again."""
    assert apcbatch(*RUN, "--limit", 5).code == 0
    assert apcbatch(*RUN, "--resume").code == 3
    facts = json.loads((out.parent / "out.jsonl.run.json").read_text())
    first, second = processes_of(out)
    assert facts["begin"] == first.begin
    records = read_records(out)
    for number, record in enumerate(records):
        own, process = record["apcbatch"], (first, second)[number >= 10]
        begin_s = process.begin - first.begin
        assert process.end is not None
        if record["error"] is not None:
            assert own["begin_s"] is None and begin_s <= own["end_s"] <= begin_s + process.end.seconds
        else:
            assert begin_s <= own["begin_s"] <= own["end_s"] <= begin_s + process.end.seconds
            assert own["begin_s"] == round(own["begin_s"], 6)
    assert any(record["error"] for record in records)


def test_without_a_file_there_is_no_entry(apcbatch: Command, out: Path) -> None:
    """Fault: a run to a stream leaves a file, or its records lack their times."""
    done = apcbatch("run", "in.jsonl", "-o", "-", "--max-tokens", 1)
    assert done.code == 3 and sorted(os.listdir(out.parent)) == ["in.jsonl"]
    assert all(json.loads(line)["apcbatch"]["end_s"] > 0 for line in done.lines)


def test_a_run_file_of_an_earlier_version_goes_on(apcbatch: Command, out: Path) -> None:
    """Fault: a run file without entries is refused, or one with entries that this version does not know loses them."""
    assert apcbatch(*RUN, "--limit", 5).code == 0
    path = out.parent / "out.jsonl.run.json"
    facts = json.loads(path.read_text())
    strange = {"of": "a later version"}
    for number, (earlier, kept) in enumerate(
        [({}, []), ({"processes": [strange], "dropped_processes": 3}, [strange]), ({"processes": 7, "begin": "x"}, [])]
    ):
        bare = {name: value for name, value in facts.items() if name not in ("begin", "processes", "dropped_processes")}
        path.write_text(json.dumps(bare | earlier))
        assert apcbatch(*RUN, "--resume", "--limit", 6 + number).code == 0
        found = json.loads(path.read_text())
        assert found["processes"][:-1] == kept and found["processes"][-1]["end"]["exit_code"] == 0
        assert found["begin"] == found["processes"][-1]["begin"]
        assert found["dropped_processes"] == (3 if kept else 0)


def test_the_entries_are_bounded(apcbatch: Command, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the run file grows with each --resume until nothing reads it, or the last entry is dropped."""
    for sizes, most_bytes, left in [
        ([1] * 70, 1 << 20, 64),
        ([100] * 5, 250, 2),
        ([100, 10_000], 250, 1),
        ([10_000, 100], 250, 1),
        ([], 250, 0),
    ]:
        entries = ["x" * size for size in sizes]
        with monkeypatch.context() as patch:
            patch.setattr(processes, "MOST_BYTES", most_bytes)
            assert bounded(entries) == entries[len(entries) - left :]
    monkeypatch.setattr(processes, "MOST_PROCESSES", 2)
    for limit in range(1, 5):
        assert apcbatch(*RUN, *["--resume"] * (limit > 1), "--limit", limit).code == 0
    facts = json.loads((out.parent / "out.jsonl.run.json").read_text())
    assert (len(facts["processes"]), facts["dropped_processes"]) == (2, 2)
    assert facts["begin"] < facts["processes"][0]["begin"]


def test_long_texts_are_cut() -> None:
    """Fault: a command of a megabyte, or warnings of many, make a run file that is too large to be read back."""
    assert plain("x" * 4096) == "x" * 4096 and plain("x" * 4097) == "x" * 4096 + "..." and plain("\udcff") == "?"
    assert plain({"\udcff": ["\udcff", 1, None]}) == {"?": ["?", 1, None]}
    assert continuing("x" * (1 << 15)) is not None and continuing("x" * ((1 << 15) + 1)) is None is continuing(None)
    summary = {"ok": 3, "warnings": ["x" * 5000] * 100, "drafts": {"\udcff": 1}}
    end = make_end(1.5, 3, summary)
    assert (end.seconds, end.exit_code, end.summary) == (1.5, 3, {"ok": 3, "drafts": {"?": 1}})
    assert runfile.MAX_BYTES > 2 * processes.MOST_BYTES


def test_damaged_entries_are_refused(apcbatch: Command, out: Path) -> None:
    """Fault: an entry that somebody edited ends the report in a traceback, or is shown with numbers that cannot be."""
    assert apcbatch(*RUN).code == 3
    entry = json.loads((out.parent / "out.jsonl.run.json").read_text())["processes"][0]
    process_of(entry), process_of(entry | {"end": None, "continue_command": None, "later": 1})
    assert set(entry) == set(process_of(entry).__slots__)
    for name, values in {
        "version": [3, None],
        "begin": [-1, "2", None, True, 1e300],
        "command": [None, ["apcbatch"]],
        "options": [{}, [["a", 1]], [[1, 1, "x"]], [["a", 1, None]], None],
        "machine": [None, []],
        "continue_command": [7],
        "end": [3, {}, *(entry["end"] | {name: None} for name in entry["end"])],
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"its {name} is not what was expected"):
                process_of(entry | {name: value})
    with pytest.raises(ValueError, match="no object"):
        process_of([])


@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_run_file_that_cannot_be_replaced_ends_nothing(
    apcbatch: Command, out: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Fault: a full disk ends a run because of its entry; or a file that another program puts there is replaced."""
    path, flush, rename = out.parent / "out.jsonl.run.json", FakeEngine.flush, Disk.rename
    seen = []

    def appears(self: FakeEngine) -> None:
        path.unlink()
        path.write_text("mine")
        flush(self)

    def refused(self: Disk, source: str, target: str) -> None:
        seen.append(target)
        if seen.count(str(path)) == 2:
            raise OSError(28, "No space left on device")
        rename(self, source, target)

    if when == "end":
        monkeypatch.setattr(FakeEngine, "flush", appears)
    else:
        monkeypatch.setattr(Disk, "rename", refused)
    done = apcbatch(*RUN)
    assert done.code == 3 and done.summary["ok"] == 40
    assert done.stderr.count("out.jsonl.run.json cannot be written: ") == 1
    assert path.read_text() == "mine" if when == "end" else not json.loads(path.read_text())["processes"]


@pytest.mark.slow
def test_names_that_are_no_utf8(start: Callable[..., Any], tmp_path: Path) -> None:
    """Fault: a command cannot be written as JSON, and ends a run that has its answers."""
    name, out = os.fsdecode(b"in\xff.jsonl"), os.fsdecode(b"out\xff.jsonl")
    write_lines(tmp_path / name, [conversation(1), "{", conversation(2)])
    done = start("run", name, "-o", out, "--strict").end()
    assert done.code == 1 and "internal error" not in done.stderr
    [process] = processes_of(tmp_path / out)
    assert process.end is not None and process.end.exit_code == 1
    assert r"$'out\xff.jsonl'" in str(process.continue_command), "which a shell reads as that name"


def test_a_trace_is_refused_and_an_old_one_stays(apcbatch: Command, out: Path) -> None:
    """Fault: --no-trace is an unknown option without a word, or a run replaces or answers the file of an earlier
    version."""
    trace = out.parent / "out.jsonl.trace.jsonl"
    trace.write_text("old\n")
    for flag in ("--no-trace", "--trace"):
        done = apcbatch(*RUN, flag)
        assert done.code == 2 and f"{flag} is not an option any more; a run writes no trace" in done.stderr
    assert apcbatch(*RUN, "--overwrite").code == 3 and trace.read_text() == "old\n"


def test_the_machine_is_described_by_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the page of a run names a GPU that it did not use, or nothing that it did."""
    import torch

    from apcbatch.kernels import processor

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(processes.os, "sysconf", lambda name: {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}[name])
    cpu, cuda = (processes.describe_machine(device) for device in ("cpu", "cuda"))
    assert (cpu["gpu"], cuda["gpu"], cpu["torch"]) == (None, "a GPU", torch.__version__)
    assert (cpu["threads"], cpu["instructions"]) == (torch.get_num_threads(), processor.isa())
    assert cpu["memory_bytes"] == 3 * 4096 and cpu["cores"] == len(os.sched_getaffinity(0))
    for name in ("torch", "apcbatch.kernels.processor"):
        monkeypatch.delitem(sys.modules, name)
    bare = processes.describe_machine("cuda")
    assert [bare[name] for name in ("gpu", "torch", "threads", "instructions")] == [None] * 4
    assert orjson.dumps(bare)


def test_the_processor_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fault: a machine whose /proc/cpuinfo has no name, or that has none, ends the run."""
    monkeypatch.setattr(cores.platform, "processor", lambda: "P")
    assert cores.processor_name(tmp_path) == "P"
    (tmp_path / "proc").mkdir()
    for content, name in [("model: 1\nmodel name\t: A: 1\nmodel name\t: B\n", "A: 1"), ("vendor: x\n", "P")]:
        (tmp_path / "proc" / "cpuinfo").write_text(content)
        assert cores.processor_name(tmp_path) == name
