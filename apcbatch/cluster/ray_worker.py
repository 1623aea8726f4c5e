"""WorkerActor: a worker in a Ray actor's process, with the messages of each unit as a stream.

Invariants:
- A single thread creates and uses the worker.
- A state is returned by its own call, `state`. So the driver gets a reference and never the bytes, and the state
  outlives this process. (Ray may lose what a stream has yielded if the process ends before the stream.)
- Every fetch is bounded.
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
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from apcbatch.cluster.ray_cluster import fulfil
from apcbatch.cluster.recovery import make_file, read_in_flight
from apcbatch.cluster.runtime import MOST_UNITS, WorkerFacts
from apcbatch.cluster.wire import Done, Exported, Key, Message, Unit

if TYPE_CHECKING:
    from apcbatch.cluster.worker import Worker

CONCURRENCY = MOST_UNITS + 3
FETCH_S = 60.0  # maximum time to fetch all states of a unit
MOST_WARNINGS = 100  # maximum warnings that wait for the driver

T = TypeVar("T")


Make = Callable[..., "Worker"]


@dataclass(frozen=True, slots=True)
class StateRef:
    """Reference to a state in Ray's object store. node: node of the worker that made it."""

    ref: Any
    node: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    """Result of opening a worker.

    node_id: Ray's id of its node. in_flight: path of its in-flight file on that node. warnings: sentences for the user.
    """

    facts: WorkerFacts
    node_id: str
    in_flight: str
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Warned:
    """Warning of the worker, a sentence for the user."""

    sentence: str


@dataclass(frozen=True, slots=True)
class _Raised:
    error: Exception


Sent = Message | Warned


def take_in_flight(path: str) -> Collection[int] | None:
    """Read and delete the in-flight file of a worker on this node. Return None if it cannot be read."""
    numbers = read_in_flight(path)
    with suppress(OSError):
        os.unlink(path)
    return numbers


def make_worker(**options: Any) -> Worker:
    """Create the worker. This imports torch, in the worker's process."""
    from apcbatch.cluster.worker import Worker
    from apcbatch.process import settle_allocator

    settle_allocator()
    return Worker(**options)


class WorkerActor:
    """Ray actor with one worker. `start` creates the worker, so that a failure is the error of a call.

    Ray runs the methods in threads: one for each unit, one for `hold`, and two more.
    """

    def __init__(self) -> None:
        self._worker: Worker
        self._node = self._in_flight = ""
        self._warnings: deque[str] = deque(maxlen=MOST_WARNINGS)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._messages: dict[int, SimpleQueue[Message | _Raised]] = {}  # by unit number
        self._states: dict[tuple[int, Key], Any] = {}  # announced but not taken, by unit number and key
        threading.Thread(target=self._serve, daemon=True).start()

    def start(self, make: Make, options: Mapping[str, Any]) -> Opened:
        """Create the worker with `make`. options: its arguments besides those that the actor adds."""
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        self._node = f"{socket.gethostname()}/{node_id[:8]}"
        self._in_flight = make_file()

        def open_worker() -> WorkerFacts:
            self._worker = make(
                **options,
                node=self._node,
                in_flight=self._in_flight,
                warn=self._warnings.append,
                report_alive=self._on_message,
            )
            return self._worker.facts()

        facts = self._call_in_worker_thread(open_worker)
        return Opened(facts, node_id, self._in_flight, [one.sentence for one in self._take_warnings()])

    def hold(self) -> None:
        """Never return: the driver awaits this call, which fails when the process ends."""
        threading.Event().wait()

    def work(self, unit: Unit, states: Sequence[tuple[Key, StateRef]]) -> Iterator[list[Sent]]:
        """Run a unit, and yield its messages in batches. `state` returns the state of each Exported message."""
        messages = self._messages[unit.number] = SimpleQueue()
        fetched, import_counters = self._fetch(states)
        self._call_in_worker_thread(lambda: self._worker.begin(unit, fetched))
        fetched.clear()  # so that Ray can free its copies
        unsent: list[Sent] = []
        is_done = False
        while not is_done:
            message = messages.get()
            if isinstance(message, _Raised):
                yield unsent
                raise message.error
            is_done = isinstance(message, Done)
            if isinstance(message, Done):
                message = replace(message, counters={**message.counters, **import_counters})
            if isinstance(message, Exported):
                self._states[unit.number, message.key] = message.state
                message = replace(message, state=None)
            unsent.append(message)
            if is_done or messages.empty():
                yield [*self._take_warnings(), *unsent]
                unsent = []
        del self._messages[unit.number]

    def state(self, unit: int, key: Key) -> np.ndarray:
        """Remove and return the state of an Exported message, (bytes,) uint8. Ray returns an array without a copy."""
        return np.frombuffer(self._states.pop((unit, key)), np.uint8)

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Return the subset of the prefix keys whose snapshot is on this node."""
        return self._call_in_worker_thread(lambda: self._worker.held(keys))

    def close(self) -> None:
        """Finish writing the store, and delete the in-flight file."""
        self._call_in_worker_thread(lambda: self._worker.close())
        with suppress(OSError):
            os.unlink(self._in_flight)

    def _call_in_worker_thread(self, act: Callable[[], T]) -> T:
        """Call a function in the worker's thread between two passes; return its result or raise its error."""
        future: Future[T] = Future()
        self._inbox.put(partial(fulfil, future, act))
        return future.result()

    def _serve(self) -> None:
        """Run the worker's thread: execute queued calls, and run passes while there is work."""
        while True:
            try:
                self._inbox.get(block=not self._messages or not self._worker.is_busy)()
            except Empty:
                try:
                    for message in self._worker.step():
                        self._on_message(message)
                except Exception as error:  # the engine is broken: all units fail, and the driver ends the process
                    for messages in list(self._messages.values()):
                        messages.put(_Raised(error))
                    return

    def _on_message(self, message: Message) -> None:
        """Queue a message for its unit's stream."""
        self._messages[message.unit].put(message)

    def _fetch(self, states: Sequence[tuple[Key, StateRef]]) -> tuple[dict[Key, memoryview], dict[str, float]]:
        """Fetch states from Ray's object store.

        Returns the available ones as read-only views, and the counters `import_bytes` and `import_s`.
        """
        import ray

        if not states:
            return {}, {}
        begin = time.monotonic()
        ready = set(ray.wait([state.ref for _, state in states], num_returns=len(states), timeout=FETCH_S)[0])
        fetched = {}
        for key, state in states:
            if state.ref not in ready:  # late: the worker computes it again
                continue
            with suppress(ray.exceptions.RayError):  # lost with its node: likewise
                fetched[key] = memoryview(ray.get(state.ref, timeout=FETCH_S))
        num_bytes = sum(state.num_bytes for key, state in states if key in fetched and state.node != self._node)
        return fetched, {"import_bytes": num_bytes, "import_s": time.monotonic() - begin} if num_bytes else {}

    def _take_warnings(self) -> list[Warned]:
        """Take all queued warnings."""
        return [Warned(self._warnings.popleft()) for _ in range(len(self._warnings))]
