"""Worker processes that run the user's tools (--tools) beside the engine, which never waits for them.

Invariants: each request gets one reply: a value, an error, or that its worker is lost; no longer than its time limit
after it was sent. A worker is a process group, which ends with the run, even if the run is killed. The code is trusted,
what it returns is not: replies are JSON of bounded length.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from apcbatch.errors import UsageError
from apcbatch.job.tool_child import HEAD, frame

MOST_REPLY_BYTES = 64 << 20
START_SECONDS = 30.0  # that a worker may take to import the code, besides the time limit
DROP_SECONDS = 5.0  # in which a worker must confirm that an episode was dropped
MOST_WAIT_S = 0.2  # between two looks at whether workers live
_HERE = str(Path(__file__).resolve().parents[2])
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from apcbatch.job.tool_child import main; "
    "main({requests}, {replies}, {life}, {memory})"
)


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to a request. key: its episode. value: a JSON value. seconds: time that the code took. error: the sentence
    if there is no value. is_lost: the worker ended, perhaps through another episode: make the episode again."""

    key: int
    op: int
    value: Any = None
    seconds: float = 0.0
    error: str | None = None
    is_lost: bool = False


@dataclass(slots=True)
class _Pending:
    """A request without a reply. what: its code, for the sentence if it takes too long. deadline: monotonic time.

    error: the sentence, once it has taken too long. drops: None; of an episode's end, its request that took too long,
    or -1.
    """

    key: int
    what: str
    deadline: float
    error: str | None = None
    drops: int | None = None


class _Worker:
    """A running worker. pending: op -> request without a reply. episodes: keys of its episodes. is_own: it has one
    episode alone. is_loaded: it has imported the code."""

    def __init__(self, factory: str, memory: int, log: int, is_own: bool = False) -> None:
        (child_in, self._requests), (self.replies, child_out), (life, self._life) = os.pipe(), os.pipe(), os.pipe()
        paths = [_HERE, *(path for path in sys.path if path not in ("", os.getcwd())), os.getcwd()]
        program = _PROGRAM.format(path=paths, requests=child_in, replies=child_out, life=life, memory=memory)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child_in, child_out, life),
                env=os.environ | {"PYTHONHASHSEED": "0"},  # sets in one order, for results that --resume compares
                start_new_session=True,
            )
        except OSError:
            for one in (self._requests, self.replies, self._life):
                os.close(one)
            raise
        finally:
            for one in (child_in, child_out, life):
                os.close(one)
        os.set_blocking(self._requests, False)
        os.set_blocking(self.replies, False)
        self.pending: dict[int, _Pending] = {}
        self.episodes: set[int] = set()
        self.is_own, self.is_loaded, self.is_broken = is_own, False, False
        self._unsent, self._read = bytearray(frame({"do": "load", "factory": factory, "op": 0})), bytearray()

    def send(self, data: bytes) -> None:
        """Queue a request, and write what the pipe takes."""
        self._unsent += data
        self.write()

    def write(self) -> None:
        """Write what the pipe takes. A worker that is gone is found by `values`."""
        with suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                del self._unsent[: os.write(self._requests, self._unsent)]

    def register(self, poll: select.poll) -> None:
        """Register the events that this worker waits for."""
        poll.register(self.replies, select.POLLIN)
        if self._unsent:
            poll.register(self._requests, select.POLLOUT)

    def values(self) -> list[dict[str, Any]]:
        """Read the replies that are there. Sets is_broken after the last one of a worker that has ended."""
        has_ended = self._process.poll() is not None
        with suppress(BlockingIOError):
            while data := os.read(self.replies, 1 << 16):
                self._read += data
            self.is_broken = True
        self.is_broken |= has_ended
        found = []
        while len(self._read) >= HEAD.size:
            [size] = HEAD.unpack_from(self._read)
            end = HEAD.size + size
            self.is_broken |= size > MOST_REPLY_BYTES
            if size > MOST_REPLY_BYTES or len(self._read) < end:
                break
            try:
                value = orjson.loads(self._read[HEAD.size : end])
            except orjson.JSONDecodeError:
                value = None
            del self._read[:end]
            if isinstance(value, dict) and isinstance(value.get("op"), int):
                found.append(value)
            else:
                self.is_broken = True
        return found

    def end(self) -> str:
        """Kill the process group, and return how the worker ended."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for one in (self._requests, self.replies, self._life):
            os.close(one)
        status = self._process.wait()
        return f"by signal {-status}" if status < 0 else f"with exit status {status}"


@dataclass
class ToolWorkers:
    """The workers of one run. factory: as in --tools. number: most workers that share episodes. timeout: seconds of one
    request. memory: limit of a worker in bytes, 0 for none. log: descriptor of the file that gets what the code
    prints. num_lost: workers that ended before the run."""

    factory: str
    number: int
    timeout: float
    memory: int
    log: int
    num_lost: int = 0
    digest: str = ""
    _workers: list[_Worker] = field(default_factory=list)
    _places: dict[int, _Worker] = field(default_factory=dict)  # key -> worker
    _alone: set[int] = field(default_factory=set)  # keys that were in a call when a worker with several ended
    _queue: deque[tuple[int, int, str, dict[str, Any]]] = field(default_factory=deque)  # of those, not made yet
    _ready: list[Reply] = field(default_factory=list)
    _op: int = 0

    def open(self) -> None:
        """Start the first worker, and set the digest of the module. UsageError if the factory cannot be loaded."""
        worker = self._start(False)
        worker.pending[0] = _Pending(-1, "the import", time.monotonic() + self.timeout + START_SECONDS)
        while True:
            for reply in self.poll(MOST_WAIT_S):
                if reply.op == 0 and isinstance(reply.value, str):
                    self.digest = reply.value
                    return
                self.close()
                raise UsageError(
                    f"--tools {self.factory} cannot be used: {reply.error}; expected PACKAGE.MODULE:FACTORY, where "
                    "FACTORY(row) returns an episode"
                )

    def has(self, key: int) -> bool:
        """Return whether an episode is made and its worker lives."""
        return key in self._places

    def ask(self, key: int, do: str, **values: Any) -> int:
        """Send a request, and return its number. do: `make` for a new episode; `call`, `next` and `score` after it."""
        self._op += 1
        if do == "make" and key in self._alone:
            self._queue.append((key, self._op, do, values))
            return self._op
        if do == "make":
            self._places[key] = self._choose()
        self._send(self._places[key], key, self._op, do, values)
        return self._op

    def drop(self, key: int, expired: int = -1) -> None:
        """End an episode. expired: its request that took too long: its code is interrupted, and fails if its worker
        confirms that. If the worker does not, any of its episodes may be the reason, and it is lost."""
        worker = self._places.pop(key, None)
        if worker is None:
            return
        worker.episodes.discard(key)
        if worker.is_own:
            self._end(worker)
            self._alone.discard(key)
            return
        self._op += 1
        worker.pending[self._op] = _Pending(key, "drop", time.monotonic() + DROP_SECONDS, drops=expired)
        worker.send(frame({"do": "drop", "key": key, "op": self._op, "hangs": expired >= 0}))

    def poll(self, seconds: float) -> list[Reply]:
        """Return the replies that have come; wait for the first one at most that long."""
        end = time.monotonic() + seconds
        while True:
            left = 0.0 if self._ready else max(0.0, min(end - time.monotonic(), MOST_WAIT_S))
            self._make_alone()
            poll = select.poll()
            for worker in self._workers:
                worker.register(poll)
            poll.poll(1000 * left)
            for worker in list(self._workers):
                worker.write()
                self._take(worker)
            if self._ready or time.monotonic() >= end:
                found, self._ready = self._ready, []
                return found

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._places.clear()

    def _start(self, is_own: bool) -> _Worker:
        try:
            worker = _Worker(self.factory, self.memory, self.log, is_own)
        except OSError as error:
            raise UsageError(f"a worker of --tools cannot be started: {error.strerror}") from None
        self._workers.append(worker)
        return worker

    def _choose(self) -> _Worker:
        """Return the worker with the fewest episodes; a new one while there are fewer than `number`."""
        shared = [worker for worker in self._workers if not worker.is_own]
        best = min(shared, key=lambda worker: len(worker.episodes), default=None)
        if best is None or (best.episodes and len(shared) < self.number):
            return self._start(False)
        return best

    def _make_alone(self) -> None:
        """Make episodes that wait for a worker of their own, while there are fewer than `number` such workers."""
        while self._queue and sum(worker.is_own for worker in self._workers) < self.number:
            key, op, do, values = self._queue.popleft()
            worker = self._places[key] = self._start(True)
            self._send(worker, key, op, do, values)

    def _send(self, worker: _Worker, key: int, op: int, do: str, values: Mapping[str, Any]) -> None:
        worker.episodes.add(key)
        what = f"call({values['name']!r})" if do == "call" else do
        seconds = self.timeout + (0.0 if worker.is_loaded else START_SECONDS)
        worker.pending[op] = _Pending(key, what, time.monotonic() + seconds)
        worker.send(frame({"do": do, "key": key, "op": op, **values}))

    def _take(self, worker: _Worker) -> None:
        """Take the replies of a worker, and end what has taken too long."""
        for value in worker.values():
            worker.is_loaded = True
            asked = worker.pending.pop(value["op"], None)
            if asked is not None and asked.drops is not None:
                if (expired := worker.pending.pop(asked.drops, None)) is not None:
                    self._ready.append(Reply(asked.key, asked.drops, None, self.timeout, expired.error))
            elif asked is not None:
                seconds, error = value.get("seconds", 0.0), asked.error or value.get("error")
                self._ready.append(Reply(asked.key, value["op"], value.get("value"), seconds, error))
        if worker.is_broken:
            self._lose(worker)
            return
        now = time.monotonic()
        for op, asked in list(worker.pending.items()):
            if now < asked.deadline:
                continue
            asked.error = f"{asked.what} took more than {self.timeout:g} s (--tool-timeout)"
            if asked.drops is not None or worker.is_own:
                self._lose(worker)
                return
            if asked.key in self._places:
                asked.deadline = math.inf
                self.drop(asked.key, op)
            else:  # another call of the same answer took too long
                del worker.pending[op]
                self._ready.append(Reply(asked.key, op, None, self.timeout, asked.error))

    def _lose(self, worker: _Worker) -> None:
        """Take note that a worker is gone, or must go. An episode that was in a call alone is the reason; of several,
        each is made again in a worker of its own."""
        how = self._end(worker)
        self.num_lost += 1
        asked = [(op, one) for op, one in worker.pending.items() if one.drops is None]
        keys = {one.key for _, one in asked}
        error = None
        if len(keys) == 1:
            error = asked[0][1].error or f"{asked[0][1].what} ended its worker process {how}"
            self._alone -= keys
        else:
            self._alone |= keys
        self._ready += [Reply(one.key, op, None, 0.0, error, error is None) for op, one in asked]

    def _end(self, worker: _Worker) -> str:
        self._workers.remove(worker)
        for key in worker.episodes:
            self._places.pop(key, None)
        return worker.end()
