"""Run untrusted work (a chat template, a grammar) in helper processes of bounded time and memory.

Invariants: the work cannot take more than its processor time and memory, block for longer than its wall-clock limit, or
harm the run. A helper that died is started again. Each answer belongs to its item, even after a restart. The child is
in its own session, so it gets no signals of the terminal. It ends with its Helper and with the run, even when stopped.
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
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from apcbatch.data.helper_child import end_with_parent; end_with_parent(); "
    "from {module} import main; main()"
)


class LimitExceeded(RequestError):
    """The work takes more than a helper's time or stack (invalid_request), or memory (out_of_memory)."""


class _ChildFailed(Exception):
    """The child gives no more answers. The text, if any, says how it failed."""


class Helper:
    """A helper process, started at the first request and again after a failure.

    module: module whose `main` runs in the child. name: subject of error messages. start: values of the start request,
    which sets up the child and has no answer. That request and each answer may take CPU_SECONDS of processor time.
    """

    def __init__(self, module: str, name: str, *start: Any) -> None:
        self._module, self._name = module, name
        self._start = pack_request(CPU_SECONDS, *start)
        self._child: _Child | None = None

    def ask(self, item: Any, *values: Any) -> tuple[bytes, bytes]:
        """Return the kind and the bytes of the answer to one item. Raises the RequestErrors that `answers` yields."""
        [answer] = self.answers([item], *values)
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def answers(self, items: Sequence[Any], *values: Any) -> Iterator[tuple[bytes, bytes] | RequestError]:
        """Yield an answer for each item: (kind, bytes), or an error.

        values: sent once, for all items. The child works on later items while the caller uses the earlier answers. A
        child is replaced if it dies, or if the caller stops before the last answer. An item that exceeds a limit gets
        LimitExceeded. An item at which two children die for another reason gets worker_lost, the error code of failures
        that the request did not cause. An item for which no child can be started gets out_of_memory. ValueError for
        values that cannot be sent or are nested too deeply.
        """
        done = failures = 0
        while done < len(items):
            child, error = None, None
            request = pack_request(CPU_SECONDS, list(items[done:]), *values)
            wall_seconds = _wall_seconds(CPU_SECONDS * (1 if self._child is not None else 2))
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
                error = self._error(child.exit_status, str(failed), failures, CPU_SECONDS)
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
        """Return the error of an item at which `failures` children died; None if the item is to be tried again.

        exit_status: status of the last child. how: clause that says how this child failed, or empty. seconds: limit of
        processor time."""
        if exit_status == -signal.SIGPROF:
            return LimitExceeded("invalid_request", f"it takes more than {seconds:g} seconds of processor time")
        if exit_status == -signal.SIGABRT:  # a library aborts if it gets no memory
            return _no_memory()
        if failures == 1:
            return None
        if exit_status == -signal.SIGSEGV:
            return LimitExceeded("invalid_request", "it is nested too deeply")
        how = how or f"ended with status {exit_status}"
        return RequestError("worker_lost", f"{self._name} {how}, twice; run it again")


class _Child:
    """A running child; OSError if it cannot be started. end: function that ends it; a second call does nothing."""

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
        """Return the exit status: negative for a signal, None while the child runs."""
        return self._process.poll()

    def send(self, request: bytes, wall_seconds: float) -> None:
        """Write a request; the first call writes the start request before it.

        _ChildFailed if the child does not read it in time. If the child dies meanwhile, `receive` raises instead."""
        deadline = time.monotonic() + wall_seconds
        rest, self._unsent = memoryview(self._unsent + request), b""
        with suppress(BrokenPipeError):
            while rest:
                self._wait(self._requests, select.POLLOUT, deadline)
                rest = rest[os.write(self._requests, rest) :]

    def receive(self, wall_seconds: float) -> tuple[bytes, bytes]:
        """Read the kind and the bytes of one answer; _ChildFailed if there is none."""
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
        """Wait until the child reads or writes; _ChildFailed after the deadline.

        Poll once more after the deadline, since this process may have been stopped meanwhile."""
        poll = select.poll()
        poll.register(descriptor, event)
        if not (poll.poll(1000 * max(0.0, deadline - time.monotonic())) or poll.poll(0)):
            raise _ChildFailed("gives no answer, though it was waited for")


def _wall_seconds(cpu_seconds: float) -> float:
    """Return the wall-clock limit of one answer: enough on a busy machine, but finite if the child is stopped."""
    return 10 + 10 * cpu_seconds


def _no_memory() -> LimitExceeded:
    return LimitExceeded("out_of_memory", f"it needs more than {rounded_size(MEMORY_BYTES)} of memory")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the child's pipes, and kill it if it still runs after a second."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
