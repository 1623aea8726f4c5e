"""Signals: SIGKILL anywhere, Ctrl-C once and twice, SIGTERM, a terminal or a reader that goes away."""

from __future__ import annotations

import json
import os
import pty
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from apcbatch.cli.program import main
from tests.chats import conversation, read_records, write_lines
from tests.effort import is_full
from tests.job.conftest import ROOT, answers, processes_of

pytestmark = pytest.mark.slow
RUN = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 4, "--max-running", 3, "--progress", "none")
PROGRAM = f"{sys.executable} -m tests.job.fake_main"
IN_TERMINAL = """import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"""


def in_bash(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command with pipes, to its end."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "APCBATCH_POLICY": "all"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def undisturbed(apcbatch, tmp_path):
    """The answers of a run that nothing disturbs: 40 requests."""
    write_lines(tmp_path / "in.jsonl", [*(conversation(number) for number in range(20))])
    assert apcbatch("run", "in.jsonl", "-o", "whole.jsonl", "--max-tokens", 4).code == 0
    return answers(read_records(tmp_path / "whole.jsonl"))


def test_killed_three_times_each_request_is_there_once(undisturbed, start, tmp_path, monkeypatch):
    """Fault: SIGKILL loses or doubles a request, or a part that is continued by its names alone has other options."""
    monkeypatch.delenv("APCBATCH_MAX_TOKENS")  # bare: it is the run file's
    out, bare = tmp_path / "out.jsonl", (*RUN[:4], "--max-running", 3, "--progress", "none", "--resume")
    for lines, words in ((1, (*RUN, "--resume")), (9, bare), (22, bare)):
        process = start(*words, FAKE_HOLD_AT=lines)
        process.wait_for_lines(out, lines)
        process.send(signal.SIGKILL)
        assert process.end().code == -signal.SIGKILL
    last = start(*bare).end()
    assert last.code == 0, last.stderr
    assert 0 < last.summary["already_done"] < 40
    assert answers(read_records(out)) == undisturbed


def test_killed_with_drafts_in_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: what a killed run had drafted, or other drafts after --resume, changes or loses an answer; a run that was
    begun in float32 continues in the checkpoint's own dtype. With the real engine, which verifies drafts from the whole
    answers when it is killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("APCBATCH_MAX_TOKENS")
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(10)])
    run = ["run", "in.jsonl", "-q", "--progress", "none"]
    drawn = ["--max-tokens", "60", "--ignore-eos", "--temperature", "0.7", "--dtype", "float32"]
    assert main([*run, *drawn, "-o", "whole.jsonl", "--draft", "none"]) == 0
    undisturbed, out = answers(read_records(Path("whole.jsonl"))), Path("out.jsonl")
    run += ["-o", "out.jsonl", "--max-running", "2", "--resume"]
    given_up = 0
    kills = ((1, "previous"), (5, "previous,history,lookup"), (11, "recorded,previous"))
    for lines, drafts in kills if is_full() else (kills[0], random.choice(kills[1:])):
        words = [*run, *(drawn if lines == 1 else []), "--draft", drafts, "--draft-from", "whole.jsonl"]
        process = subprocess.Popen([sys.executable, "-m", "apcbatch", *words], stdout=subprocess.DEVNULL,
                                   env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})  # fmt: skip
        while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= lines):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        given_up += process.wait() == -signal.SIGKILL
    assert given_up
    accepted = sum(json.loads(line)["apcbatch"]["accepted_tokens"] for line in out.read_bytes().splitlines()[:5])
    assert accepted > 100
    assert main([*run, "--draft", "history,lookup", "--draft-memory", "9KiB"]) == 0
    assert answers(read_records(out)) == undisturbed


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_one_signal_drains(undisturbed, start, tmp_path, number, code):
    """Fault: what runs is dropped, or new requests are begun, or the last line, or the run file's command, does not
    continue the run."""
    out = tmp_path / "out.jsonl"
    process = start(*RUN, FAKE_HOLD_AT=2)
    process.wait_for_lines(out, 2)
    process.send(number)
    drained = process.end()
    assert drained.code == code, drained.stderr
    answered = len(read_records(out))
    assert drained.summary["requests"] == answered < 40
    assert "running requests are finished first" in drained.stderr
    words = shlex.split(drained.final_line)
    assert words[-1] == "--resume"
    resumed = start(*words[1:]).end()
    assert resumed.code == 0 and resumed.summary["requests"] == 40 - answered
    assert answers(read_records(out)) == undisturbed
    process, _ = processes_of(out)
    assert process.end.exit_code == code and process.continue_command == drained.final_line
    assert process.end.summary == drained.summary


def test_a_terminal_that_is_closed_drains(undisturbed, tmp_path):
    """Fault: the window or the connection is closed, and what runs is dropped, or the last lines end in a traceback."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, "-m", "tests.job.fake_main", *map(str, RUN[:-1]), "bar"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "FAKE_HOLD_AT": "2"}, start_new_session=True,
        stdin=end, stdout=end, stderr=end,
    )  # fmt: skip
    os.close(end)
    out = tmp_path / "out.jsonl"
    while not (out.exists() and out.read_bytes().count(b"\n") >= 2):
        os.read(terminal, 1 << 16)
    os.close(terminal)
    assert process.wait(timeout=60) == 143
    [process] = processes_of(out)
    assert process.end.exit_code == 143 and process.end.summary["requests"] == len(read_records(out)) < 40


def test_the_second_signal_stops_at_once(undisturbed, start, tmp_path):
    """Fault: a second Ctrl-C waits for what runs, or leaves something that cannot be resumed."""
    out = tmp_path / "out.jsonl"
    process = start(*RUN[:4], "--max-tokens", 4, "--max-running", 30, FAKE_HOLD_AT=1, FAKE_HOLD_ON=1)
    process.wait_for_lines(out, 1)
    process.send(signal.SIGINT)
    process.wait_for_words("running requests are finished first")
    process.send(signal.SIGINT)
    stopped = process.end()
    assert stopped.code == 130
    assert shlex.split(stopped.final_line)[-1] == "--resume"
    resumed = start(*RUN, "--resume").end()
    assert resumed.code == 0
    assert answers(read_records(out)) == undisturbed


def test_a_reader_that_goes_away_does_not_end_the_job(undisturbed, start, tmp_path):
    """Fault: `apcbatch run ... | head -1` stops the job, or ends in a traceback."""
    done = in_bash(f"{PROGRAM} {shlex.join(map(str, RUN))} | head -1", tmp_path)
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
    assert answers(read_records(tmp_path / "out.jsonl")) == undisturbed


def test_a_reader_of_the_results_that_goes_away_ends_the_job(start, tmp_path):
    """Fault: `apcbatch run -o - | head -1` continues computing without a reader, or ends in a traceback."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(2000)])
    run = f"{PROGRAM} run in.jsonl -o - -q --max-tokens 1"
    done = in_bash(f"{run} | head -1; echo ${{PIPESTATUS[0]}}", tmp_path)
    assert done.stdout.splitlines()[1:] == ["1"]
    assert "reader of the results is gone" in done.stderr and "Traceback" not in done.stderr


def test_interrupted_while_loading(undisturbed, start, tmp_path):
    """Fault: Ctrl-C before the first request ends in a traceback, or its last line does not begin the run."""
    process = start(*RUN, FAKE_LOAD_S=30)
    process.wait_for_words("loading")
    process.send(signal.SIGINT)
    stopped = process.end()
    assert stopped.code == 130 and "Traceback" not in stopped.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert start(*shlex.split(stopped.final_line)[1:]).end().code == 0
    assert answers(read_records(tmp_path / "out.jsonl")) == undisturbed
