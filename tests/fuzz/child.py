"""A command line in a forked child: how it ended, how long it took, how much memory it held at most.

Invariant: nothing here outlives its clock; a child that does is killed with all of its
own children, and that is a fault. The parent has everything imported and has run no kernel, so a child starts at once.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CODES = (0, 1, 2, 3, 130, 143)
CLOCK_S = 30.0
"""What a case may take, of whose few requests each may use a helper's whole time; `patience` multiplies it on machines
with other work to do."""
PEAK_BYTES = 1 << 30
"""What a case may hold: the program with PyTorch takes 0.4 GiB."""
ADDRESS_BYTES = 24 << 30
"""Where the system stops a child, so that a fault does not take the machine with it."""


class Fault(AssertionError):
    """A case that did not end as every case must."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """code: the exit code. peak_bytes: the most memory that was resident."""

    code: int
    seconds: float
    peak_bytes: int
    stdout: str
    stderr: str


def call(arguments: Sequence[str], folder: Path, patience: float = 1.0) -> Outcome:
    """Run one command line in the folder; Fault where it breaks a promise that holds for every command line."""
    begin = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(arguments, folder)
    status, usage = _wait(pid, begin + CLOCK_S * patience)
    outcome = Outcome(
        os.waitstatus_to_exitcode(status),
        time.monotonic() - begin,
        usage.ru_maxrss * 1024,
        (folder / "stdout.txt").read_text(errors="replace"),
        (folder / "stderr.txt").read_text(errors="replace"),
    )
    _check(outcome)
    return outcome


def _become(arguments: Sequence[str], folder: Path) -> None:
    """Be the program; never returns."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
            fd = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            os.dup2(fd, number)
            os.close(fd)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        from apcbatch.cli.program import main

        code = main(list(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, end: float) -> tuple[int, resource.struct_rusage]:
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            _kill_group(pid)
            return status, usage
        if time.monotonic() > end:
            _kill_group(pid)
            os.wait4(pid, 0)
            raise Fault("it did not end in time")
        time.sleep(0.005)


def _kill_group(pid: int) -> None:
    """End what the child left running."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _check(outcome: Outcome) -> None:
    """What holds for every command line."""
    said = f"\nstderr: {outcome.stderr[-1500:]}"
    if outcome.code not in CODES:
        raise Fault(f"exit code {outcome.code} is not a documented one{said}")
    if "Traceback" in outcome.stderr or "internal error" in outcome.stderr:
        raise Fault(f"a user would see where the program broke{said}")
    if outcome.code not in (0, 3) and not (outcome.stderr + outcome.stdout).strip():
        raise Fault(f"exit code {outcome.code} without a word")
    if outcome.peak_bytes > PEAK_BYTES:
        raise Fault(f"it held {outcome.peak_bytes >> 20} MiB")
