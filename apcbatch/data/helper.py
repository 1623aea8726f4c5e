"""Helper processes: untrusted work (a chat template, a grammar, a tokenizer) in bounded time and memory.

Must not know: what is asked. Invariants: nothing that a helper does or suffers takes more than its processor time and
memory, or waits longer than its wall clock, or harms the run; a helper that ended is begun anew; an answer is never
taken for another's. The child is out of reach of the terminal's signals, and ends with its Helper.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from apcbatch.data.helper_child import ANSWER_HEAD, CPU_SECONDS, MEMORY_BYTES, NO_MEMORY, framed
from apcbatch.errors import RequestError
from apcbatch.values import rounded_size

MAX_ANSWER_BYTES = 256 << 20
_HERE = str(Path(__file__).resolve().parents[2])
_PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main()"


class BeyondBounds(RequestError):
    """Work that takes more than a helper's time (invalid_request) or memory (out_of_memory)."""


class _Ended(Exception):
    """A child that gives no more answers."""


class Helper:
    """Answers of one helper process. module: whose `main` it runs. name: what it is, for errors. head: the values of
    its first request, which has no answer. seconds: of processor time, for each answer; start_seconds: for that."""

    def __init__(
        self, module: str, name: str, *head: Any, seconds: float = CPU_SECONDS, start_seconds: float = CPU_SECONDS
    ) -> None:
        self._module, self._name, self._seconds, self._start_seconds = module, name, seconds, start_seconds
        self._head = framed(start_seconds, *head)
        self._child: _Child | None = None

    def ask(self, *values: Any, seconds: float = 0) -> tuple[bytes, bytes]:
        """The letter and the bytes of the one answer to a request; raises the RequestErrors of `answers`.

        seconds: of processor time, besides those of each answer.
        """
        [answer] = self.answers(lambda done: values, 1, seconds)
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def answers(
        self, values: Callable[[int], tuple[Any, ...]], count: int, more_seconds: float = 0
    ) -> Iterator[tuple[bytes, bytes] | RequestError]:
        """`count` answers. values: of a request for those behind the first so many; ValueError where they are not JSON
        or nested too deeply.

        Answers are made while the earlier ones are used. A child that ends before an answer, or is left before its last
        one, is replaced; where a second one ends at the same answer, that answer is an error: BeyondBounds, or
        worker_lost, which has no cause in the request.
        """
        seconds = self._seconds + more_seconds
        done = failures = 0
        while done < count:
            child, error = None, None
            request = framed(seconds, *values(done))
            wall_seconds = _wall_seconds(seconds + (self._start_seconds if self._child is None else 0))
            try:
                child, self._child = self._child or _Child(self._module, self._head), None
                child.send(request, wall_seconds)
                while child is not None:
                    letter, data = child.receive(wall_seconds)
                    done, failures = done + 1, 0
                    if done == count:
                        self._child, child = child, None
                    yield _beyond_memory() if letter == NO_MEMORY else (letter, data)
            except _Ended as ended:
                assert child is not None
                child.end()
                failures += 1
                error = self._error(child.status, str(ended), failures, seconds)
            except OSError as refused:
                reason = f"{self._name} cannot be started: {refused.strerror}; run it again"
                error = RequestError("out_of_memory", reason)
            finally:
                if child is not None:
                    child.end()
            if error is not None:
                done, failures = done + 1, 0
                yield error

    def _error(self, status: int | None, how: str, failures: int, seconds: float) -> RequestError | None:
        """The error of an answer at which so many children ended, the last one with this status; None: try again."""
        if status == -signal.SIGPROF:
            return BeyondBounds("invalid_request", f"it takes more than {seconds:g} seconds of processor time")
        if status == -signal.SIGABRT:  # a library that finds no memory
            return _beyond_memory()
        if failures == 1:
            return None
        if status == -signal.SIGSEGV:
            return BeyondBounds("invalid_request", "it is nested too deeply")
        return RequestError("worker_lost", f"{self._name} {how or f'ended with status {status}'}, twice; run it again")


class _Child:
    """A running child; OSError if it cannot be started. end: ends it; a second call does nothing."""

    def __init__(self, module: str, head: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=[_HERE, *sys.path], module=module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)
        self.end = weakref.finalize(self, _end, self._process)
        self._head = head

    @property
    def pid(self) -> int:
        """The system's number of it."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def send(self, request: bytes, wall_seconds: float) -> None:
        """Write a request, the first time behind the head. _Ended if the child does not read it in time; if it dies
        before it does, its answer will be missing."""
        deadline = time.monotonic() + wall_seconds
        rest, self._head = memoryview(self._head + request), b""
        with suppress(BrokenPipeError):
            while rest:
                self._wait(self._requests, select.POLLOUT, deadline)
                rest = rest[os.write(self._requests, rest) :]

    def receive(self, wall_seconds: float) -> tuple[bytes, bytes]:
        """The letter and the bytes of one answer; _Ended if there is none."""
        deadline = time.monotonic() + wall_seconds
        letter, num_bytes = ANSWER_HEAD.unpack(self._read(ANSWER_HEAD.size, deadline))
        if num_bytes > MAX_ANSWER_BYTES:
            raise _Ended(f"gave an answer of {num_bytes:,} bytes")
        return letter, self._read(num_bytes, deadline)

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        parts, missing = [], num_bytes
        while missing:
            self._wait(self._answers, select.POLLIN, deadline)
            parts.append(os.read(self._answers, missing))
            if not parts[-1]:
                raise _Ended
            missing -= len(parts[-1])
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        """Wait until the child reads or writes. Looks once more at the end: the run itself may have been stopped."""
        poll = select.poll()
        poll.register(descriptor, event)
        if not (poll.poll(1000 * max(0.0, deadline - time.monotonic())) or poll.poll(0)):
            raise _Ended("gives no answer, though it was waited for")


def _wall_seconds(cpu_seconds: float) -> float:
    """How long one answer is waited for: long enough for a busy machine, not for ever, as for a stopped process."""
    return 10 + 10 * cpu_seconds


def _beyond_memory() -> BeyondBounds:
    return BeyondBounds("out_of_memory", f"it needs more than {rounded_size(MEMORY_BYTES)} of memory")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the child go, and end one that is still at work."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
