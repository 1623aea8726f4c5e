"""Standard streams that are closed, full or left by their reader."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from apcbatch.cli.streams import HANDLED, kept_signals
from tests.conftest import ROOT

pytestmark = pytest.mark.slow  # each starts a process
RUN = f"{sys.executable} -m tests.job.fake_main run in.jsonl --max-tokens 1 --policy all"
PLAN = f"{sys.executable} -m apcbatch plan in.jsonl --block-sizes 64"
LINE = '{"messages":[{"role":"user","content":"Hi %d"}]}\n'


def in_bash(command, folder):
    """(exit code, stdout, stderr) of a command with redirections."""
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=folder, capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["doctor", "run in.jsonl -o out.jsonl", "convert demo q --to int8"])
def test_a_current_folder_that_was_removed_is_named(tmp_path, command):
    """Fault: MKL ends the process in the middle of the command, or an output is said to be unusable."""
    there = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m apcbatch {command}"
    code, out, said = in_bash(there, tmp_path)
    assert (code, out) == (2, "") and said.splitlines()[-1].startswith("apcbatch: the current folder cannot be used: ")


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("command", "code", "sentence"),
    [
        (f"{RUN} -o - >&-", 2, "standard output is closed; give -o a file"),
        (f"{RUN} -o out.jsonl >&-", 0, "40 ok"),
        (f"{RUN} -o out.jsonl 2>&-", 0, ""),
        (f"{RUN} -o out.jsonl >&- 2>&- <&-", 0, ""),
        (f"{RUN} -o out.jsonl --progress bar >/dev/full", 0, "standard output cannot be written: No space left"),
        (f"{RUN} -o out.jsonl --progress bar 2>/dev/full", 0, ""),
        (f"{RUN} -o /dev/full", 1, "output /dev/full cannot be written: No space left"),
        (f"{RUN} -o - >/dev/full", 1, "standard output cannot be written: No space left"),
        (f"{RUN} -o out.jsonl --summary /dev/full", 0, "--summary /dev/full was not written: No space left"),
        (f"{PLAN} | head -1", 1, ""),
        (f"{PLAN} >/dev/full", 1, "No space left"),
        (f"{PLAN} --json /dev/full", 2, "--json /dev/full cannot be written: No space left"),
        (f"{PLAN} >&-", 0, ""),
    ],
)  # fmt: skip
def test_a_stream_that_takes_nothing_ends_in_a_sentence(tmp_path, command, code, sentence):
    """Fault: a traceback, an `internal error`, or OUT gets the descriptor of a closed stream and what is printed."""
    (tmp_path / "in.jsonl").write_text("".join(LINE % number for number in range(40)))
    found, _, said = in_bash(command, tmp_path)
    assert sentence in said
    assert found == code or ("head" in command and found == 0), said
    if "out.jsonl" in command:
        lines = (tmp_path / "out.jsonl").read_text().splitlines()
        assert len(lines) == 40 and all(line.startswith('{"id":"apc-') for line in lines)


@pytest.mark.parametrize(
    "command",
    [
        f"PYTHONIOENCODING=ascii {RUN} -o out.jsonl",
        f"PYTHONIOENCODING=latin-1 {sys.executable} -m apcbatch show in.jsonl",
    ],
)
def test_a_stream_without_a_character_shows_its_escape(tmp_path, command):
    """Fault: an id that the encoding of standard output lacks ends the command with an internal error."""
    (tmp_path / "in.jsonl").write_text('{"id": "東", "messages": [{"role": "user", "content": "Hi"}]}\n', "utf-8")
    code, printed, said = in_bash(command, tmp_path)
    assert code == 0 and "\\u6771#1" in printed + said


PROGRAM = """
import atexit, os, signal, sys
from apcbatch.cli import main
from apcbatch.job import opening
from tests.job.fakes import FakeEngine

def stop(*_):
    os.kill(os.getpid(), signal.SIGINT)

opening.make_engine = FakeEngine
place = sys.argv.pop(1)
if place != "at_exit":
    setattr(FakeEngine, place, stop)
atexit.register(stop)
sys.exit(main())
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("place", "code"), [("flush", 3), ("close", 0), ("at_exit", 3)])
def test_an_interrupt_while_the_run_ends_changes_nothing(tmp_path, place, code):
    """Fault: Ctrl-C in the last moment is a traceback, or takes the command that continues along."""
    (tmp_path / "in.jsonl").write_text(LINE % 1 + "{" * (code == 3))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, place, "run", "in.jsonl", "-o", "out.jsonl", "--policy", "all"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "KeyboardInterrupt" not in done.stderr
    assert code == 0 or done.stderr.splitlines()[-1].startswith("nothing is left to do: ")


def test_a_command_leaves_the_signals_as_they_were():
    """Fault: a program that calls `main` cannot be ended with Ctrl-C afterwards."""
    before = [signal.getsignal(number) for number in HANDLED]
    with kept_signals():
        for number in HANDLED:
            signal.signal(number, lambda *_: None)
    assert [signal.getsignal(number) for number in HANDLED] == before
