"""Worker processes that run the user's tools (--tools) beside the engine, which never waits for them.

Invariants: each request gets one reply: a value, an error, or that its worker is lost, in bounded time. A worker is a
process group, which ends with the run, even if the run is killed. The code is trusted, what it returns is not: replies
are JSON of bounded length.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apcbatch.config import Config
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.input.messages import ContentWarnings
from apcbatch.data.input.tools import check_tools
from apcbatch.display import counted
from apcbatch.errors import RequestError, UsageError
from apcbatch.job.tool_child import STACK_BYTES, json_line
from apcbatch.tools import TOO_LONG, too_long

TOOLS_LOG_SUFFIX = ".tools.log"
MOST_REPLY_BYTES = 1 << 30
START_SECONDS = 30.0  # that a worker may take to import the code, besides the time limit
GRACE_SECONDS = 0.5  # after its time limit, in which code says itself that it took too long
DROP_SECONDS = 5.0  # in which a worker must confirm that an episode was dropped
KILL_SECONDS = 1.0  # in which a killed worker ends, unless the system holds it, as on a file server that is gone
MOST_OPEN = 1 << 12  # episodes
MOST_LATE = 64  # replies of a worker that takes more episodes
MOST_IDLE_LOSSES = 8  # of workers that end while none of their code is called
MOST_WAIT_S = 0.2  # between two looks at whether workers live
_EXPECTED = "expected PACKAGE.MODULE:FACTORY, where FACTORY(row) returns an episode"
_HERE = str(Path(__file__).resolve().parents[2])
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from apcbatch.job.tool_child import main; main({number}, {memory}, {timeout})"
)
LIVE_OPTIONS = (
    "samples", "max_turns", "max_episode_tokens", "history", "tool_workers", "tool_timeout", "tool_memory"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to a request. key: its episode. value: a JSON value. error: the sentence if there is no value. is_lost: the
    worker ended, perhaps through another episode: make the episode again."""

    key: int
    value: Any = None
    error: str | None = None
    is_lost: bool = False


@dataclass(slots=True)
class _Asked:
    """A request without a reply. what: clause that names its code. limit: seconds. deadline: monotonic time. end:
    num_queued of the worker after this request. error: the sentence for a request over its time limit, whose episode
    the worker was asked to drop; None within the limit."""

    key: int
    what: str
    limit: float
    deadline: float
    end: int = 0
    error: str | None = None


class _Worker:
    """A running worker. socket: requests and replies. asked: op -> request without a reply. episodes: keys of its
    episodes. num_late: requests that took too long, each perhaps with a thread that still runs. unsent: bytes of
    requests. num_queued: number of bytes of requests, sent or not. is_own: it has one episode alone. is_loaded: it has
    imported the code."""

    def __init__(self, config: Config, log: int, is_own: bool) -> None:
        self.socket, theirs = socket.socketpair()
        paths = [_HERE, *(path for path in sys.path if path not in ("", os.getcwd())), os.getcwd()]
        number, memory, timeout = theirs.fileno(), config.tool_memory or 0, config.tool_timeout
        # sets in one order, for results that --resume compares; one arena of memory for all threads
        settings = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
        program = _PROGRAM.format(path=paths, number=number, memory=memory, timeout=timeout)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[number],
                env=os.environ | settings,
                start_new_session=True,
            )
        self.socket.setblocking(False)
        self.asked: dict[int, _Asked] = {}
        self.episodes: set[int] = set()
        self.num_late = 0
        self.is_own, self.is_loaded, self.is_broken, self.is_heard = is_own, False, False, False
        self.unsent, self._read, self.num_queued = bytearray(), bytearray(), 0
        self.send(0, -1, "load", config.tools)

    def send(self, op: int, key: int, do: str, *values: Any) -> None:
        """Queue a request, and write what the socket takes."""
        line = json_line({"op": op, "key": key, "do": do, "values": values})
        self.unsent += line
        self.num_queued += len(line)
        self.write()

    def write(self) -> None:
        """Send as many queued bytes as the socket takes. Restart the time limit of each request that was not sent
        whole before, as this run may have been busy since. A worker that has ended is found by `replies`."""
        before = self.num_queued - len(self.unsent)
        with suppress(BlockingIOError, ConnectionError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        now = time.monotonic()
        for one in self.asked.values() if before < self.num_queued - len(self.unsent) else ():
            if before < one.end:
                one.deadline = max(one.deadline, now + one.limit)

    def replies(self, looks: bool) -> list[dict[str, Any]]:
        """Return the replies that are there. Sets is_heard if bytes came, perhaps with more behind them, and
        is_broken if they are the last of a worker that has ended. looks: see whether it has, even if another process
        holds its socket."""
        has_ended, self.is_heard = looks and self._process.poll() is not None, False
        with suppress(BlockingIOError, ConnectionError):
            while data := self.socket.recv(1 << 16):
                self._read += data
                self.is_heard = True
            has_ended = True
        *lines, self._read = self._read.split(b"\n")
        self.is_broken |= has_ended or len(self._read) > MOST_REPLY_BYTES
        return [json.loads(line) for line in lines]

    def end(self) -> str:
        """Kill the process group, and return how the worker ended."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.socket.close()
        try:
            status = self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return f"by signal {signal.SIGKILL:d}, which has no effect yet"
        return f"by signal {-status}" if status < 0 else f"with exit status {status}"


class ToolWorkers:
    """The workers of one run, with the options of a Config. log: descriptor of the file that gets what the code prints.
    num_lost: workers that ended before the run. digest: of the module's file."""

    def __init__(self, config: Config, log: int) -> None:
        self.num_lost = 0
        self._config, self._log = config, log
        self._workers: list[_Worker] = []
        self._places: dict[int, _Worker] = {}  # key -> worker
        self._alone: dict[int, str | None] = {}  # key that needs a worker of its own -> how that ended
        self._queue: deque[tuple[int, int, Sequence[Any]]] = deque()  # of those, not made yet
        self._ready: list[Reply] = []
        self._op, self._most_late = 0, min(MOST_LATE, most_open(config) // config.tool_workers)
        self._looked = 0.0  # when the workers were last looked at
        self.digest = ""

    def open(self) -> None:
        """Start the first worker, and set the digest. UsageError if the factory cannot be loaded."""
        name = self._config.tools or ""
        module, _, factory = name.partition(":")
        if not (module and factory):
            missing = "a module" if factory else "a factory" if module else "a module and a factory"
            raise UsageError(f"--tools {name} does not name {missing}; {_EXPECTED}")
        try:
            worker = self._start(False)
        except OSError as error:
            raise UsageError(f"a worker of --tools cannot be started: {error.strerror}") from None
        limit = self._config.tool_timeout + START_SECONDS
        worker.asked[0] = _Asked(-1, "the import", limit, time.monotonic() + limit)
        reply = self._wait()
        if reply.error is not None:
            raise UsageError(f"--tools {name} cannot be used: {reply.error}; {_EXPECTED}")
        self.digest = reply.value

    def has(self, key: int) -> bool:
        """Return True if an episode is made and its worker runs."""
        return key in self._places

    def ask(self, key: int, do: str, *values: Any) -> None:
        """Send a request, whose reply `poll` returns. do: `make` for a new episode, with its row and sample; then
        `call` with a list of (name, arguments), `next` and `score` with the messages, `close`."""
        self._op += 1
        if do != "make":
            self._send(self._places[key], self._op, key, do, values)
        elif key not in self._alone:
            self._make(key, self._op, values, self._choose)
        elif self._alone[key] is not None:
            self._ready.append(Reply(key, error=self._alone.pop(key)))
        else:
            self._queue.append((key, self._op, values))

    def tools_for(self, row: Mapping[str, Any] | None) -> list[Any] | None:
        """Make the episode of a line, close it, and return its own tools, checked; None for those of the line.
        RequestError if it cannot be made. Not for a run."""
        self.ask(0, "make", row, 0)
        made = self._wait()
        if self.has(0):
            self.ask(0, "close")
            self._wait()
        self.drop(0)
        if made.error is not None:
            raise RequestError("tool_failed", made.error)
        return checked_tools(made.value)

    def _wait(self) -> Reply:
        while not (found := self.poll(MOST_WAIT_S)):
            pass
        return found[0]

    def drop(self, key: int) -> None:
        """Forget an episode, and end its thread."""
        self._alone.pop(key, None)
        worker = self._places.pop(key, None)
        if worker is not None:
            worker.episodes.discard(key)
            if worker.is_own:
                self._workers.remove(worker)
                worker.end()
            else:
                worker.send(0, key, "drop", False)

    def poll(self, seconds: float) -> list[Reply]:
        """Return the replies that have come; wait for the first one at most that long."""
        end = time.monotonic() + seconds
        while True:
            while self._queue and sum(worker.is_own for worker in self._workers) < self._config.tool_workers:
                if (one := self._queue.popleft())[0] in self._alone:  # it was not dropped
                    self._make(*one, lambda: self._start(True))
            poll = select.poll()
            for worker in self._workers:
                poll.register(worker.socket, select.POLLIN | select.POLLOUT * bool(worker.unsent))
            poll.poll(1000 * (0.0 if self._ready else max(0.0, min(end - time.monotonic(), MOST_WAIT_S))))
            now = time.monotonic()
            looks = now - self._looked > MOST_WAIT_S / 2
            self._looked = now if looks else self._looked
            for worker in list(self._workers):
                worker.write()
                self._take(worker, looks)
            if self._ready or time.monotonic() >= end:
                found, self._ready = self._ready, []
                return found

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _start(self, is_own: bool) -> _Worker:
        worker = _Worker(self._config, self._log, is_own)
        self._workers.append(worker)
        return worker

    def _choose(self) -> _Worker:
        """Return the worker with the fewest episodes; a new one while there are fewer than --tool-workers. One that
        was late too often takes no more."""
        shared = [one for one in self._workers if not one.is_own and one.num_late < self._most_late]
        best = min(shared, key=lambda worker: len(worker.episodes), default=None)
        may_start = len(shared) < self._config.tool_workers
        return self._start(False) if best is None or (best.episodes and may_start) else best

    def _make(self, key: int, op: int, values: Sequence[Any], choose: Callable[[], _Worker]) -> None:
        try:
            worker = self._places[key] = choose()
        except OSError as error:
            self._ready.append(Reply(key, error=f"its worker process cannot be started: {error.strerror}"))
            return
        worker.episodes.add(key)
        self._send(worker, op, key, "make", values)

    def _send(self, worker: _Worker, op: int, key: int, do: str, values: Sequence[Any]) -> None:
        calls = [f"call({name!r})" for name, _ in values[0]] if do == "call" else [do.replace("make", "the factory")]
        limit = self._config.tool_timeout * len(calls) + GRACE_SECONDS
        deadline = time.monotonic() + limit + START_SECONDS * (not worker.is_loaded)
        worker.asked[op] = _Asked(key, " or ".join(dict.fromkeys(calls)), limit, deadline)
        worker.send(op, key, do, *values)
        worker.asked[op].end = worker.num_queued

    def _take(self, worker: _Worker, looks: bool) -> None:
        """Take the replies of a worker. looks: end what has taken too long, too, unless its reply may be behind the
        bytes that came: in a long step of the engine, replies fill the socket."""
        now = time.monotonic()
        for value in worker.replies(looks):
            for one in () if worker.is_loaded else worker.asked.values():
                one.deadline = now + one.limit
            worker.is_loaded = True
            if (asked := worker.asked.pop(value["op"], None)) is not None:
                if asked.error is not None:
                    self._places.pop(asked.key, None)
                    worker.episodes.discard(asked.key)
                error = asked.error or value["error"]
                worker.num_late += error is not None and error.endswith(TOO_LONG)
                self._ready.append(Reply(asked.key, value["value"], error))
        for op, asked in list(worker.asked.items()) if looks and not worker.is_heard else ():
            if now < asked.deadline or worker.is_broken:
                continue
            worker.is_broken = worker.is_own or asked.error is not None or op == 0
            asked.error, asked.deadline = too_long(asked.what, self._config.tool_timeout), now + DROP_SECONDS
            worker.send(op, asked.key, "drop", True)
        if worker.is_broken:
            self._lose(worker)
        elif worker.num_late >= self._most_late and not worker.episodes:
            self._workers.remove(worker)
            worker.end()

    def _lose(self, worker: _Worker) -> None:
        """Remove a worker that has ended or must end. Its only episode is the reason; of several, those whose code was
        called are made again in workers of their own."""
        self._workers.remove(worker)
        self.num_lost += 1
        how = worker.end()
        for key in worker.episodes:
            self._places.pop(key, None)
        asked = worker.asked.values()
        is_alone = len(worker.episodes.union(one.key for one in asked)) <= 1  # those that were dropped count
        for one in asked:
            error = one.error or f"{one.what} ended its worker process {how}"
            self._ready.append(Reply(one.key, error=error) if is_alone else Reply(one.key, is_lost=True))
        if worker.is_own and not asked:
            self._alone |= dict.fromkeys(worker.episodes, f"its worker process ended {how} between two calls")
        elif not is_alone and (asked or self.num_lost > MOST_IDLE_LOSSES):
            self._alone |= dict.fromkeys([one.key for one in asked] or worker.episodes)


def most_open(config: Config) -> int:
    """Return how many episodes may be open: the stacks of their threads get a quarter of --tool-memory."""
    if config.tool_memory is None:
        return MOST_OPEN
    return min(MOST_OPEN, config.tool_workers * (config.tool_memory // (4 * STACK_BYTES)))


def factory_name(tools: str | Callable[..., Any]) -> str:
    """Return the name `PACKAGE.MODULE:FACTORY` of a factory. UsageError if workers could not import it by that."""
    if isinstance(tools, str):
        return tools
    module, name = getattr(tools, "__module__", None), getattr(tools, "__qualname__", "<")
    if module in (None, "__main__") or "<" in name:
        raise UsageError(
            f"tools is {name} of {module}, which the processes of tools cannot import; define it at the top of a module"
        )
    return f"{module}:{name}"


def checked_tools(made: Mapping[str, Any]) -> list[Any] | None:
    """Check and return an episode's own tools; None if it has none. made: value of the reply to `make`. Raises
    RequestError for tools that are not in OpenAI's form."""
    try:
        return None if made["tools"] is None else check_tools(made["tools"], "tools", ContentWarnings()) or []
    except RequestError as error:
        raise RequestError("tool_failed", f"the episode's {error.message}") from None


def check_live_options(config: Config) -> None:
    """Raise UsageError if an option of live episodes is given without --turns live."""
    unused = [name for name in LIVE_OPTIONS if getattr(config, name) != getattr(Config, name)]
    if unused and config.turns != "live":
        instead = "; several answers to one prompt are n in its line" if unused[0] == "samples" else ""
        raise UsageError(
            f"{config.origins[unused[0]]} is for live episodes; give --turns live and --tools too{instead}"
        )


def with_tools(
    config: Config, records: Iterator[Conversation | BadLine], warn: Callable[[str], None]
) -> Iterator[Conversation | BadLine]:
    """Yield the records; for the first turns of live episodes, with --tools, with the tools of their episodes."""
    if config.turns != "live":
        if config.tools is not None:
            raise UsageError("--tools needs --turns live; give both, or neither")
        check_live_options(config)
        yield from records
        return
    whose = "of the lines; --tools gives those of the episodes" if config.tools is None else "that --tools gives"
    warn(f"of live episodes only the first turns are known here, with the tools {whose}")
    with opened_workers(config, os.devnull, warn) as workers:
        for record in records:
            if workers is not None and isinstance(record, Conversation):
                try:
                    if (tools := workers.tools_for(record.row)) is not None:
                        record.tools = tools or None
                except RequestError as error:
                    record = BadLine(record.line, error, record.request_id(1), record.id, record.digest)
            yield record


@contextmanager
def opened_workers(config: Config, log: str | None, warn: Callable[[str], None]) -> Iterator[ToolWorkers | None]:
    """Open the tool workers of a run, and end them at the end of the block; None without --tools. log: path of the file
    that gets what tools print; None for standard error. UsageError if the tools cannot be used."""
    if config.tools is None:
        yield None
        return
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_TRUNC * config.overwrite
        file = os.dup(2) if log is None else os.open(log, flags, 0o666)
    except OSError as error:
        raise UsageError(f"{log} cannot be written: {error.strerror}; choose another -o") from None
    workers = ToolWorkers(config, file)
    try:
        workers.open()
        yield workers
        if workers.num_lost:
            lost = counted(workers.num_lost, "worker")
            warn(f"{lost} of --tools ended during the run; unfinished episodes were made again")
    finally:
        workers.close()
        os.close(file)
