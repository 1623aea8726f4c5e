"""WorkerActor: a worker in a Ray actor's process, with the messages of each unit as a stream.

Invariants:
- A single thread creates and uses the worker.
- A reference to an imported state is kept until the driver has dropped the state: an object that a process releases at
  the moment when it receives it again may never become ready (a race in Ray, seen in 2.60).
- A state is returned by its own call, `state`. So the driver gets a reference and never the bytes, and the state
  outlives this process. (Ray may lose what a stream has yielded if the process ends before the stream.)
- Every fetch is bounded.
"""

from __future__ import annotations

import os
import socket
import threading
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
class Opened:
    """Result of opening a worker.

    node_id: Ray's id of its node. in_flight: path of its in-flight file on that node. warnings: sentences for the user.
    """

    facts: WorkerFacts
    node_id: str
    in_flight: str
    warnings: list[str]


Sent = Message | str  # a text is a warning of the worker, a sentence for the user


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
        self._in_flight = ""
        self._warnings: deque[str] = deque(maxlen=MOST_WARNINGS)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._messages: dict[int, SimpleQueue[Message | Exception]] = {}  # by unit number
        self._states: dict[tuple[int, Key], Any] = {}  # announced but not taken, by unit number and key
        self._imported: dict[Key, Any] = {}  # references to the imported states
        threading.Thread(target=self._serve, daemon=True).start()

    def start(self, make: Make, options: Mapping[str, Any]) -> Opened:
        """Create the worker with `make`. options: its arguments besides those that the actor adds."""
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        node = f"{socket.gethostname()}/{node_id[:8]}"
        self._in_flight = make_file()

        def open_worker() -> WorkerFacts:
            self._worker = make(
                **options,
                node=node,
                in_flight=self._in_flight,
                warn=self._warnings.append,
                report_alive=self._on_message,
            )
            return self._worker.facts()

        facts = self._call_in_worker_thread(open_worker)
        return Opened(facts, node_id, self._in_flight, self._take_warnings())

    def hold(self) -> None:
        """Never return: the driver awaits this call, which fails when the process ends."""
        threading.Event().wait()

    def work(self, unit: Unit, states: Sequence[tuple[Key, Any]], dropped: Collection[Key]) -> Iterator[list[Sent]]:
        """Run a unit, and yield its messages in batches. `state` returns the state of each Exported message.

        states: references to the imports, each with its key. dropped: imports of earlier units that no unit reads
        again.
        """
        for key in dropped:
            self._imported.pop(key, None)
        self._imported.update(states)
        messages = self._messages[unit.number] = SimpleQueue()
        fetched = _fetch(states)
        self._call_in_worker_thread(lambda: self._worker.begin(unit, fetched))
        fetched.clear()  # so that Ray can free its copies
        unsent: list[Sent] = []
        is_done = False
        while not is_done:
            message = messages.get()
            if isinstance(message, Exception):
                yield unsent
                raise message
            is_done = isinstance(message, Done)
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
                        messages.put(error)
                    return

    def _on_message(self, message: Message) -> None:
        """Queue a message for its unit's stream."""
        self._messages[message.unit].put(message)

    def _take_warnings(self) -> list[str]:
        """Take all queued warnings."""
        return [self._warnings.popleft() for _ in range(len(self._warnings))]


def _fetch(states: Sequence[tuple[Key, Any]]) -> dict[Key, memoryview]:
    """Fetch states from Ray's object store. Return those that arrived within FETCH_S, as read-only views."""
    import ray

    fetched: dict[Key, memoryview] = {}
    if states:
        ready = set(ray.wait([ref for _, ref in states], num_returns=len(states), timeout=FETCH_S)[0])
        for key, ref in states:
            if ref in ready:  # the worker computes a late or lost one again
                with suppress(ray.exceptions.RayError):
                    fetched[key] = memoryview(ray.get(ref, timeout=FETCH_S))
    return fetched
