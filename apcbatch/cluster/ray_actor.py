"""WorkerActor: a worker in a process of its own that Ray places, and what it says as a stream.

Must not know: the driver, what units hold. Invariants: one thread alone touches the worker, and makes it; a state
leaves by a call of its own, `state`, so that the driver has its reference and never its bytes, and so that it outlives
this process (Ray may take what a stream has yielded for lost when the process ends before the stream does); no fetch
waits without a bound.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np

from apcbatch.cluster.at_work import make_file, read_at_work
from apcbatch.cluster.seam import MOST_UNITS, WorkerFacts
from apcbatch.cluster.unit import Done, Key, Made, Message, Unit

CONCURRENCY = MOST_UNITS + 3
FETCH_S = 60.0  # for all states of a unit
MOST_WARNINGS = 100

T = TypeVar("T")


class WorkerLike(Protocol):
    """What the actor needs of a worker; see worker.py."""

    @property
    def is_busy(self) -> bool:
        """Whether a unit that was begun is not done."""

    def facts(self) -> WorkerFacts:
        """What the driver needs to know of it."""

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Those of the prefix keys whose snapshot is there."""

    def begin(self, unit: Unit, states: Mapping[Key, Any]) -> None:
        """Take a unit on."""

    def step(self) -> list[Message]:
        """One pass, and what came of the units that were begun."""

    def close(self) -> None:
        """Finish the store's writing."""


Make = Callable[..., WorkerLike]


@dataclass(frozen=True, slots=True)
class StateRef:
    """Where a state lies. ref: Ray's reference. node: of the worker that made it."""

    ref: Any
    node: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    """A worker that is open. node_id: Ray's id of its node. at_work: the path there of its file of who is at work.
    warnings: sentences for the user."""

    facts: WorkerFacts
    node_id: str
    pid: int
    at_work: str
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Warned:
    """A sentence for the user."""

    sentence: str


@dataclass(frozen=True, slots=True)
class _Raised:
    error: Exception


Sent = Message | Warned


def take_at_work(path: str) -> Collection[int] | None:
    """What a worker of this node that has ended was at; the file goes. None if it cannot be read."""
    numbers = read_at_work(path)
    with suppress(OSError):
        os.unlink(path)
    return numbers


def make_worker(**options: Any) -> WorkerLike:
    """The worker itself; torch is imported here, in the worker's process."""
    from apcbatch.cluster.worker import Worker
    from apcbatch.process import settle_allocator

    settle_allocator()
    return Worker(**options)


class WorkerActor:
    """One worker. It has none until `start`, so that what is wrong with it is said as an error of a call.

    Ray runs its methods in threads: the units, `hold` and two more at a time.
    """

    def __init__(self) -> None:
        self._worker: WorkerLike
        self._node = self._at_work = ""
        self._warnings: deque[str] = deque(maxlen=MOST_WARNINGS)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._said: dict[int, SimpleQueue[Message | _Raised]] = {}  # by unit
        self._states: dict[tuple[int, Key], Any] = {}  # by unit and key: those that are told and not taken yet
        threading.Thread(target=self._serve, daemon=True).start()

    def start(self, make: Make, options: Mapping[str, Any]) -> Opened:
        """Open the worker. options: what `make` gets beside what the actor knows."""
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        self._node = f"{socket.gethostname()}/{node_id[:8]}"
        self._at_work = make_file()

        def open_worker() -> WorkerFacts:
            self._worker = make(
                **options, node=self._node, at_work=self._at_work, warn=self._warnings.append, speak=self._hear
            )
            return self._worker.facts()

        facts = self._in_turn(open_worker)
        return Opened(facts, node_id, os.getpid(), self._at_work, [one.sentence for one in self._take_warnings()])

    def hold(self) -> None:
        """Never returns: the reference of this call fails when the process ends, which is how the driver learns it."""
        threading.Event().wait()

    def work(self, unit: Unit, states: Sequence[tuple[Key, StateRef]]) -> Iterator[list[Sent]]:
        """Do a unit. Yields what was said since the last time; `state` has the state of each Made."""
        said = self._said[unit.number] = SimpleQueue()
        fetched, import_counters = self._fetch(states)
        self._in_turn(lambda: self._worker.begin(unit, fetched))
        fetched.clear()  # what Ray keeps of them may go
        unsent: list[Sent] = []
        is_done = False
        while not is_done:
            message = said.get()
            if isinstance(message, _Raised):
                yield unsent
                raise message.error
            is_done = isinstance(message, Done)
            if isinstance(message, Done):
                message = replace(message, counters={**message.counters, **import_counters})
            if isinstance(message, Made):
                self._states[unit.number, message.key] = message.state
                message = replace(message, state=None)
            unsent.append(message)
            if is_done or said.empty():
                yield [*self._take_warnings(), *unsent]
                unsent = []
        del self._said[unit.number]

    def state(self, unit: int, key: Key) -> np.ndarray:
        """A state that was told, once; Ray hands out an array without a copy."""
        return np.frombuffer(self._states.pop((unit, key)), np.uint8)

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Those of the prefix keys whose snapshot is on this node."""
        return self._in_turn(lambda: self._worker.held(keys))

    def close(self) -> None:
        """Finish the store's writing."""
        self._in_turn(lambda: self._worker.close())
        with suppress(OSError):
            os.unlink(self._at_work)

    def _in_turn(self, act: Callable[[], T]) -> T:
        """Have the worker's thread do something between two passes; what it returns or raises."""
        future: Future[T] = Future()

        def fulfil() -> None:
            try:
                future.set_result(act())
            except Exception as error:  # which is raised where it was asked for
                future.set_exception(error)

        self._inbox.put(fulfil)
        return future.result()

    def _serve(self) -> None:
        """The worker's thread: what comes for it, and passes while there is work."""
        while True:
            try:
                self._inbox.get(block=not self._said or not self._worker.is_busy)()
            except Empty:
                try:
                    for message in self._worker.step():
                        self._hear(message)
                except Exception as error:  # the engine is broken: every unit says so, and the driver ends the process
                    for said in list(self._said.values()):
                        said.put(_Raised(error))
                    return

    def _hear(self, message: Message) -> None:
        """The worker says something."""
        self._said[message.unit].put(message)

    def _fetch(self, states: Sequence[tuple[Key, StateRef]]) -> tuple[dict[Key, memoryview], dict[str, float]]:
        """The states that can be had, read-only and where Ray keeps them, and what the network had to do with them."""
        import ray

        if not states:
            return {}, {}
        begin = time.monotonic()
        refs = [state.ref for _, state in states]
        ray.wait(refs, num_returns=len(refs), timeout=FETCH_S)
        fetched = {}
        for key, state in states:
            try:
                fetched[key] = memoryview(ray.get(state.ref, timeout=1.0))
            except ray.exceptions.RayError:  # lost with its node, or not there in time: the worker does without
                continue
        num_bytes = sum(state.num_bytes for key, state in states if key in fetched and state.node != self._node)
        return fetched, {"import_bytes": num_bytes, "import_s": time.monotonic() - begin} if num_bytes else {}

    def _take_warnings(self) -> list[Warned]:
        return [Warned(self._warnings.popleft()) for _ in range(len(self._warnings))]
