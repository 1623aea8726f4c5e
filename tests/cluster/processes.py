"""A runtime whose workers are processes of this machine: the real driver and real workers, without Ray.

Invariant: a worker ends when the runtime does.
"""

from __future__ import annotations

import multiprocessing
import time
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias

from apcbatch.cluster.recovery import read_in_flight
from apcbatch.cluster.runtime import Event, Lost, Ready, Received, WorkerFacts, WorkerId
from apcbatch.cluster.wire import Done, Exported, Key, Message, Unit

Order: TypeAlias = tuple[Unit, Mapping[Key, bytes]]
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["apcbatch.cluster.worker"])  # so that torch is imported once


@dataclass(eq=False)
class State:
    """The bytes of one, for as long as somebody refers to it."""

    data: bytes


@dataclass(eq=False)
class _Local:
    """lent: the states that its units were given, by unit."""

    process: Any
    talk: Connection
    lent: dict[int, list[State]] = field(default_factory=dict)


class ProcessRuntime:
    """Implements Runtime. config: values of the run's Config by name. folder: for notes of what is at work. together:
    how many workers are ready before the first one is said to be."""

    def __init__(self, config: Mapping[str, Any], folder: Path, together: int = 1) -> None:
        self._early: list[Event] | None = []
        self._together = together
        self._config, self._folder = dict(config), folder
        self.workers: dict[WorkerId, _Local] = {}
        self.states: weakref.WeakSet[State] = weakref.WeakSet()
        self._num_spawned = 0

    def spawn(self) -> WorkerId:
        self._num_spawned += 1
        worker = self._num_spawned
        ours, its = _SERVER.Pipe()
        process = _SERVER.Process(target=_work, args=(self._config, its, self._in_flight_path(worker)), daemon=True)
        process.start()
        its.close()
        self.workers[worker] = _Local(process, ours)
        return worker

    def submit(self, worker: WorkerId, unit: Unit, states: Mapping[Key, State]) -> None:
        local = self.workers.get(worker)
        if local is not None:
            local.lent[unit.number] = list(states.values())
            with suppress(OSError):  # one that has ended is heard of elsewhere
                local.talk.send((unit, {key: state.data for key, state in states.items()}))

    def wait(self, timeout_s: float) -> list[Event]:
        talks = {local.talk: worker for worker, local in self.workers.items()}
        heard = [self._heard(talks[talk]) for talk in wait(talks, timeout_s) if isinstance(talk, Connection)]
        if self._early is None:
            return heard
        self._early += heard
        if len(self._early) < self._together:
            return []
        heard, self._early = self._early, None
        return heard

    def in_flight(self, worker: WorkerId) -> Collection[int] | None:
        return read_in_flight(self._in_flight_path(worker))

    def kill(self, worker: WorkerId) -> None:
        local = self.workers.pop(worker, None)
        if local is not None:
            local.process.kill()
            local.process.join()
            local.talk.close()

    def clock(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        for worker in list(self.workers):
            self.kill(worker)

    def _in_flight_path(self, worker: WorkerId) -> str:
        return str(self._folder / f"{worker}.at-work")

    def _heard(self, worker: WorkerId) -> Event:
        """The next word of a worker that has said something, or has ended."""
        local = self.workers[worker]
        try:
            word: WorkerFacts | Message = local.talk.recv()
        except (EOFError, OSError):
            self.kill(worker)
            return Lost(worker, f"its process ended with status {local.process.exitcode}")
        if isinstance(word, WorkerFacts):
            return Ready(worker, word)
        if isinstance(word, Exported):
            state = State(word.state)
            self.states.add(state)
            word = replace(word, state=state)
        if isinstance(word, Done):
            local.lent.pop(word.unit, None)
        return Received(worker, word)


def _work(config: Mapping[str, Any], talk: Connection, in_flight: str) -> None:
    """A worker's process: units as they come, a new one while those before it run."""
    from apcbatch.cluster.worker import Worker

    worker = Worker(config, threads=1, node="here", in_flight=in_flight, report_alive=talk.send)
    orders: SimpleQueue[Order | None] = SimpleQueue()
    Thread(target=_poll, args=(talk, orders), daemon=True).start()  # so that neither end waits for the other
    talk.send(worker.facts())
    while True:
        while not (worker.is_busy and orders.empty()):
            order = orders.get()
            if order is None:
                return
            worker.begin(*order)
        for message in worker.step():
            talk.send(message)


def _poll(talk: Connection, orders: SimpleQueue[Order | None]) -> None:
    """Hand on what the runtime says; None at the end."""
    with suppress(EOFError):
        while True:
            orders.put(talk.recv())
    orders.put(None)
