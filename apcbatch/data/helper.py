"""Helper processes: run untrusted work (a chat template, a grammar, a tokenizer) in bounded time and memory.

Invariants: no work of a helper takes more than its processor time and memory, blocks for longer than its wall-clock
limit, or harms the run; a helper that died is started again; an answer is never taken for that of another item. The
child is in a session of its own, out of reach of the terminal's signals, and ends with its Helper.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from apcbatch.data.helper_child import ANSWER_HEAD, CPU_SECONDS, MEMORY_BYTES, NO_MEMORY, pack_request
from apcbatch.errors import RequestError
from apcbatch.option_values import rounded_size

MAX_ANSWER_BYTES = 256 << 20
_HERE = str(Path(__file__).resolve().parents[2])
_PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main()"


class LimitExceeded(RequestError):
    """Work that takes more than a helper's time (invalid_request) or memory (out_of_memory)."""


class _ChildFailed(Exception):
    """A child that gives no more answers; the text, if any, says how it failed."""


class Helper:
    """A helper process, started at the first request and again after a failure.

    module: its `main` runs in the child. name: what error messages call it. start: the values of its first request,
    which sets it up and has no answer. seconds: processor time for each answer. start_seconds: for the first request.
    """

    def __init__(
        self, module: str, name: str, *start: Any, seconds: float = CPU_SECONDS, start_seconds: float = CPU_SECONDS
    ) -> None:
        self._module, self._name, self._seconds, self._start_seconds = module, name, seconds, start_seconds
        self._start = pack_request(start_seconds, *start)
        self._child: _Child | None = None

    def ask(self, item: Any, *values: Any, more_seconds: float = 0) -> tuple[bytes, bytes]:
        """The kind and the bytes of the answer to one item; raises the RequestErrors of `answers`."""
        [answer] = self.answers([item], *values, more_seconds=more_seconds)
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def answers(
        self, items: Sequence[Any], *values: Any, more_seconds: float = 0
    ) -> Iterator[tuple[bytes, bytes] | RequestError]:
        """One answer for each item: its kind and bytes, or an error.

        values: sent along once, for all items. more_seconds: of processor time for each answer, in addition. The child
        works on later items while the caller uses the earlier answers. A child that dies, or that the caller abandons
        before the last answer, is replaced. If a second child dies at the same item, its answer is LimitExceeded, or
        worker_lost, which the request did not cause. ValueError for values that are not JSON or nested too deeply.
        """
        seconds = self._seconds + more_seconds
        done = failures = 0
        while done < len(items):
            child, error = None, None
            request = pack_request(seconds, list(items[done:]), *values)
            wall_seconds = _wall_seconds(seconds + (self._start_seconds if self._child is None else 0))
            try:
                child, self._child = self._child or _Child(self._module, self._start), None
                child.send(request, wall_seconds)
                while child is not None:
                    kind, data = child.receive(wall_seconds)
                    done, failures = done + 1, 0
                    if done == len(items):
                        self._child, child = child, None
                    yield _no_memory() if kind == NO_MEMORY else (kind, data)
            except _ChildFailed as failed:
                assert child is not None
                child.end()
                failures += 1
                error = self._error(child.exit_status, str(failed), failures, seconds)
            except OSError as refused:
                reason = f"{self._name} cannot be started: {refused.strerror}; run it again"
                error = RequestError("out_of_memory", reason)
            finally:
                if child is not None:
                    child.end()
            if error is not None:
                done, failures = done + 1, 0
                yield error

    def _error(self, exit_status: int | None, how: str, failures: int, seconds: float) -> RequestError | None:
        """The error of an item at which `failures` children died, the last one with this status; None to retry."""
        if exit_status == -signal.SIGPROF:
            return LimitExceeded("invalid_request", f"it takes more than {seconds:g} seconds of processor time")
        if exit_status == -signal.SIGABRT:  # a library that finds no memory
            return _no_memory()
        if failures == 1:
            return None
        if exit_status == -signal.SIGSEGV:
            return LimitExceeded("invalid_request", "it is nested too deeply")
        how = how or f"ended with status {exit_status}"
        return RequestError("worker_lost", f"{self._name} {how}, twice; run it again")


class _Child:
    """A running child; OSError if it cannot be started. end: ends it; a second call does nothing."""

    def __init__(self, module: str, start: bytes) -> None:
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
        self._unsent = start

    @property
    def exit_status(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._process.poll()

    def send(self, request: bytes, wall_seconds: float) -> None:
        """Write a request, the first time after the start request. _ChildFailed if the child does not read it in time;
        if it dies first, `receive` finds no answer."""
        deadline = time.monotonic() + wall_seconds
        rest, self._unsent = memoryview(self._unsent + request), b""
        with suppress(BrokenPipeError):
            while rest:
                self._wait(self._requests, select.POLLOUT, deadline)
                rest = rest[os.write(self._requests, rest) :]

    def receive(self, wall_seconds: float) -> tuple[bytes, bytes]:
        """The kind and the bytes of one answer; _ChildFailed if there is none."""
        deadline = time.monotonic() + wall_seconds
        kind, num_bytes = ANSWER_HEAD.unpack(self._read(ANSWER_HEAD.size, deadline))
        if num_bytes > MAX_ANSWER_BYTES:
            raise _ChildFailed(f"gave an answer of {num_bytes:,} bytes")
        return kind, self._read(num_bytes, deadline)

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        parts, missing = [], num_bytes
        while missing:
            self._wait(self._answers, select.POLLIN, deadline)
            parts.append(os.read(self._answers, missing))
            if not parts[-1]:
                raise _ChildFailed
            missing -= len(parts[-1])
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        """Wait until the child reads or writes. Polls once more after the deadline: this process may have been stopped
        meanwhile."""
        poll = select.poll()
        poll.register(descriptor, event)
        if not (poll.poll(1000 * max(0.0, deadline - time.monotonic())) or poll.poll(0)):
            raise _ChildFailed("gives no answer, though it was waited for")


def _wall_seconds(cpu_seconds: float) -> float:
    """Wall-clock limit of one answer: enough on a busy machine, but finite, in case the process is stopped."""
    return 10 + 10 * cpu_seconds


def _no_memory() -> LimitExceeded:
    return LimitExceeded("out_of_memory", f"it needs more than {rounded_size(MEMORY_BYTES)} of memory")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the child's pipes, and kill it if it is still at work after a second."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
