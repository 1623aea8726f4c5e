"""A child process that is asked one thing after another, by whoever must not do what is untrusted in the run's own.

Must not know: what is asked (see data/frames.py for how). Invariants: the child is out of reach of the terminal's
signals, and ends with the object that stands for it.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path

from apcbatch.data.frames import ANSWER_HEAD
from apcbatch.errors import RequestError

_HERE = str(Path(__file__).resolve().parents[2])
_PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main()"


class ChildProcess:
    """A running child. module: whose `main` it runs. name: what it is, for the error if it cannot be started, a
    RequestError out_of_memory. end: ends it; a second call does nothing."""

    def __init__(self, module: str, name: str) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=[_HERE, *sys.path], module=module)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise RequestError("out_of_memory", f"{name} cannot be started: {error.strerror}; run it again") from None
        self.end = weakref.finalize(self, _end, self._process)

    @property
    def pid(self) -> int:
        """The system's number of it."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def send(self, request: bytes) -> None:
        """Write a request. If the child dies before it reads it, its answer will be missing."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(request)
            self._process.stdin.flush()

    def receive(self, most_bytes: int | None = None) -> tuple[bytes, str] | None:
        """The letter and the text of one answer, of which no more than so many bytes are read; None if the child has
        ended."""
        assert self._process.stdout is not None
        head = self._process.stdout.read(ANSWER_HEAD.size)
        if len(head) < ANSWER_HEAD.size:
            return None
        letter, num_bytes = ANSWER_HEAD.unpack(head)
        data = self._process.stdout.read(num_bytes if most_bytes is None else min(num_bytes, most_bytes))
        return letter, data.decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the child go, and end one that is still at work."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
