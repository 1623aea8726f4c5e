"""WorkerActor: a worker in a process of its own that Ray places, and what it says as a stream.

Must not know: the driver, what units hold. Invariants: a state leaves as an object of its own, right after the messages
that end with its Made, so that the driver has its reference and never its bytes; no fetch waits without a bound.

Its methods run in threads: two units at a time, `hold`, and one more call.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from apcbatch.cluster.seam import WorkerFacts
from apcbatch.cluster.unit import Done, Key, Made, Message, Unit

CONCURRENCY = 4
FETCH_S = 60.0  # for all states of a unit
MOST_UNSENT = 64
MOST_WARNINGS = 100


class WorkerLike(Protocol):
    """What the actor needs of a worker; see worker.py."""

    def facts(self) -> WorkerFacts:
        """What the driver needs to know of it."""

    def work(self, unit: Unit, states: Mapping[Key, Any]) -> Iterator[Message]:
        """Do a unit, and say what comes of it as it comes."""

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Those of the prefix keys whose snapshot is there."""

    def settle_threads(self) -> None:
        """Have the calling thread compute with the worker's number of threads."""

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
class Warned:
    """A sentence for the user."""

    sentence: str


@dataclass(frozen=True, slots=True)
class _Raised:
    error: Exception


Sent = Message | Warned


def make_worker(**options: Any) -> WorkerLike:
    """The worker itself; torch is imported here, in the worker's process."""
    from apcbatch.cluster.worker import Worker
    from apcbatch.process import settle_allocator

    settle_allocator()
    return Worker(**options)


class WorkerActor:
    """One worker. It has none until `start`, so that what is wrong with it is said as an error of a call."""

    def __init__(self) -> None:
        self._worker: WorkerLike
        self._node = ""
        self._warnings: deque[str] = deque(maxlen=MOST_WARNINGS)

    def start(self, make: Make, options: Mapping[str, Any]) -> tuple[WorkerFacts, str, int, list[str]]:
        """Open the worker. options: what `make` gets beside node and warn. The facts, Ray's id of the node, the process
        id, and sentences for the user."""
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        self._node = f"{socket.gethostname()}/{node_id[:8]}"
        self._worker = make(**options, node=self._node, warn=self._warnings.append)
        return self._worker.facts(), node_id, os.getpid(), [one.sentence for one in self._take_warnings()]

    def hold(self) -> None:
        """Never returns: the reference of this call fails when the process ends, which is how the driver learns it."""
        threading.Event().wait()

    def work(self, unit: Unit, states: Sequence[tuple[Key, StateRef]]) -> Iterator[list[Sent] | np.ndarray]:
        """Do a unit. Yields what was said since the last time, and after a list that ends with a Made, its state."""
        said: queue.Queue[Sent | _Raised] = queue.Queue(MOST_UNSENT)
        threading.Thread(target=self._do, args=(unit, states, said), daemon=True).start()
        unsent: list[Sent] = []
        while True:
            message = said.get()
            if isinstance(message, _Raised):
                raise message.error
            state = message.state if isinstance(message, Made) else None
            unsent.append(replace(message, state=None) if isinstance(message, Made) else message)
            if state is not None or isinstance(message, Done) or said.empty():
                yield [*self._take_warnings(), *unsent]
                unsent = []
            if state is not None:
                yield np.frombuffer(state, np.uint8)  # which Ray hands out without a copy
            if isinstance(message, Done):
                return

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Those of the prefix keys whose snapshot is on this node."""
        return self._worker.held(keys)

    def close(self) -> None:
        """Finish the store's writing."""
        self._worker.close()

    def _do(
        self, unit: Unit, states: Sequence[tuple[Key, StateRef]], said: queue.Queue[Sent | _Raised]
    ) -> None:
        """The unit, in a thread of its own, so that what it says never waits for the next step."""
        try:
            self._worker.settle_threads()
            begin = time.monotonic()
            fetched = _fetch(states)
            seconds = time.monotonic() - begin
            foreign = sum(state.num_bytes for key, state in states if key in fetched and state.node != self._node)
            for message in self._worker.work(unit, fetched):
                if isinstance(message, Done) and foreign:
                    counters = {**message.counters, "import_bytes": foreign, "import_s": seconds}
                    message = replace(message, counters=counters)
                said.put(message)
        except Exception as error:  # the driver is told, and ends this process
            said.put(_Raised(error))

    def _take_warnings(self) -> list[Warned]:
        return [Warned(self._warnings.popleft()) for _ in range(len(self._warnings))]


def _fetch(states: Sequence[tuple[Key, StateRef]]) -> dict[Key, memoryview]:
    """The states that can be had, read-only and where Ray keeps them."""
    import ray

    if not states:
        return {}
    refs = [state.ref for _, state in states]
    ray.wait(refs, num_returns=len(refs), timeout=FETCH_S)
    fetched = {}
    for key, state in states:
        try:
            fetched[key] = memoryview(ray.get(state.ref, timeout=1.0))
        except ray.exceptions.RayError:  # lost with its node, or not there in time: the worker does without
            continue
    return fetched
