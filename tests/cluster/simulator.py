"""Workers in virtual time behind the runtime: they take seconds by their rates, and die, stammer and dawdle as they are
told. What a worker does with a unit is in simulated_work.py.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from apcbatch.cluster.runtime import Event, Lost, Ready, Received, WorkerFacts, WorkerId
from apcbatch.cluster.wire import Alive, Answer, Key, Message, Unit
from apcbatch.plan.footprint import Footprint
from tests.cluster.simulated_work import KEYS, NEVER, SimWork, SimWorker, Span, Token


@dataclass(frozen=True)
class Speeds:
    """What workers and the network do. state_bytes: of any state."""

    prefill_tokens_per_s: float = 2000.0
    decode_tokens_per_s: float = 1000.0
    call_s: float = 1e-3
    bytes_per_s: float = 1e9
    state_bytes: int = 20 << 20
    node_bytes: int = 8 << 30  # for states
    start_s: float = 0.0  # until a worker is ready
    node_death_s: float = 1.5  # until the driver knows


@dataclass(frozen=True)
class Trouble:
    """What goes wrong. kills: (seconds, whether the whole node goes). twice: the share of messages that come again.
    delay_s: the longest a message takes beyond a call. poison: ids of requests that end their worker; hanging: that
    make it hang. mute: workers that stop talking when they are given their first unit. is_blind: nobody can tell what a
    worker was at. no_replacement: nobody comes after the first ones."""

    kills: tuple[tuple[float, bool], ...] = ()
    twice: float = 0.0
    delay_s: float = 0.0
    poison: frozenset[str] = frozenset()
    hanging: frozenset[str] = frozenset()
    mute: frozenset[WorkerId] = frozenset()
    is_blind: bool = False
    no_replacement: bool = False
    seed: int = 0


SPEEDS, CALM = Speeds(), Trouble()


class SimRuntime:
    """Implements cluster/runtime.py::Runtime. facts_of: facts of some workers that differ from those of the others."""

    def __init__(
        self,
        speeds: Speeds = SPEEDS,
        trouble: Trouble = CALM,
        workers_per_node: int = 1,
        longest_s: float = 1e7,
    ) -> None:
        self.speeds, self.trouble = speeds, trouble
        self.now = 0.0
        self.longest_s = longest_s
        self.workers: dict[WorkerId, SimWorker] = {}
        self.computed_tokens = self.num_units = self.bytes_sent = self.num_killed = 0
        self.last_answer_s = 0.0
        self.spent_s = 0.0  # of real time, in here
        self.deaths: Counter[str] = Counter()  # by request: workers that ended while they were at it
        self.check: Callable[[], None] = lambda: None
        self.facts_of: dict[WorkerId, dict[str, str]] = {}
        self.gone: set[str] = set()  # nodes
        self._per_node = workers_per_node
        self._random = random.Random(trouble.seed)
        self._agenda: list[tuple[float, int, Callable[[], Event | None]]] = []
        self._num_agenda = 0
        for when, with_node in trouble.kills:
            self.at(when, lambda with_node=with_node: self._strike(with_node))

    def spawn(self) -> WorkerId:
        worker = len(self.workers) + 1
        node = f"node{(worker - 1) // self._per_node}"
        while node in self.gone:
            node += "+"  # another machine
        one = self.workers[worker] = SimWorker(node)
        if self.trouble.no_replacement and self.now > 0:
            one.ends = self.now
            self.at(self.now, lambda: Lost(worker, "there is no room for it"))
        else:
            self.at(self.now + self.speeds.start_s, lambda: self._ready(worker))
        return worker

    def submit(self, worker: WorkerId, unit: Unit, states: Mapping[Key, Token]) -> None:
        begin = time.thread_time()
        one = self.workers[worker]
        assert set(states) == set(unit.imports), "the states that come along are not the imports"
        for key, token in states.items():
            assert token.key == key and token.made <= self.now, "an import is used before it is made"
        assert not one.is_busy or one.ends <= self.now, "a worker has two units"
        self.num_units += 1
        self._begin(worker, unit, states)
        self.spent_s += time.thread_time() - begin

    def wait(self, timeout_s: float) -> list[Event]:
        begin = time.thread_time()
        events = self._wait(timeout_s)
        self.spent_s += time.thread_time() - begin
        return events

    def _wait(self, timeout_s: float) -> list[Event]:
        assert self.now < self.longest_s, "the driver waits forever"
        self.check()
        end, events = self.now + timeout_s, list[Event]()
        while self._agenda and self._agenda[0][0] <= end and not events:
            self.now = when = max(self.now, self._agenda[0][0])
            while self._agenda and self._agenda[0][0] <= when:
                event = heapq.heappop(self._agenda)[2]()
                if event is not None:
                    events.append(event)
        if not events:
            self.now = end
        return events

    def in_flight(self, worker: WorkerId) -> set[int] | None:
        one = self.workers[worker]
        when = min(one.ends, self.now)
        return None if self.trouble.is_blind else {span.number for span in self._running(one, when)}

    def _running(self, one: SimWorker, when: float) -> list[Span]:
        return [span for span in one.spans if span.begin <= when < span.end]

    def kill(self, worker: WorkerId) -> None:
        self.die(worker, self.now, "it was ended")

    def clock(self) -> float:
        return self.now

    def close(self) -> None:
        for worker in self.workers:
            self.kill(worker)

    def at(self, when: float, act: Callable[[], Event | None]) -> None:
        self._num_agenda += 1
        heapq.heappush(self._agenda, (when, self._num_agenda, act))

    def _ready(self, worker: WorkerId) -> Event | None:
        one = self.workers[worker]
        if one.ends <= self.now:
            return None
        one.is_ready = True
        footprint, most = Footprint(self.speeds.state_bytes), 1 << 30
        facts = WorkerFacts("f", KEYS, one.node, "cpu", "float32", 1, footprint, None, most, most, 0, 4 * most)
        return Ready(worker, replace(facts, state_bytes=self.speeds.node_bytes, **self.facts_of.get(worker, {})))

    def _strike(self, with_node: bool) -> Event | None:
        """End a worker that is alive, or all of its node."""
        alive = [worker for worker, one in self.workers.items() if one.is_ready and one.ends > self.now]
        if not alive:
            return None
        first = self._random.choice(alive)
        self.num_killed += 1
        if not with_node:
            return self.die(first, self.now, "it was killed")
        self.end_node(self.workers[first].node)
        return None

    def end_node(self, node: str) -> None:
        """End a node, with its workers and states; the driver knows a little later."""
        self.gone.add(node)
        for worker, one in self.workers.items():
            if one.node == node and one.is_ready and one.ends > self.now:
                one.ends = self.now
                lost = Lost(worker, "its node is gone", with_node=True)
                self.at(self.now + self.speeds.node_death_s, lambda lost=lost: lost)

    def die(self, worker: WorkerId, when: float, reason: str) -> Event | None:
        one = self.workers[worker]
        if one.ends <= when:
            return None
        one.ends = when
        self.deaths.update(span.id for span in self._running(one, when))
        return Lost(worker, reason)

    def _begin(self, worker: WorkerId, unit: Unit, states: Mapping[Key, Token]) -> None:
        """Start a unit: everything that the worker will say is put on the agenda."""
        one = self.workers[worker]
        if one.ends <= self.now or worker in self.trouble.mute:
            return
        one.is_busy = True
        one.spans = []
        work = SimWork(self, worker, one, unit, states)
        work.run()
        if work.now == NEVER:
            return

        def end() -> None:
            one.is_busy = False
            one.spans = []

        self.at(work.now, end)

    def report_alive(self, worker: WorkerId, when: float, message: Alive) -> None:
        """Say that a worker is alive, if it still is then."""
        one, said = self.workers[worker], Received(worker, message)
        self.at(when, lambda: said if one.ends >= when else None)

    def say(self, worker: WorkerId, when: float, message: Message) -> None:
        """Put a message on its way; what a worker says comes in its order, but what comes twice may come at any
        time."""
        one = self.workers[worker]
        call_s, dice = self.speeds.call_s, self._random
        late = dice.random() * self.trouble.delay_s if self.trouble.delay_s else 0.0
        one.said_until = arrives = max(one.said_until, when + call_s + late)
        said = Received(worker, message)

        def arrive() -> Event | None:
            if one.ends < when:
                return None  # it was never said
            if isinstance(message, Answer):
                self.last_answer_s = self.now
            return said

        self.at(arrives, arrive)
        if self.trouble.twice and dice.random() < self.trouble.twice:
            self.at(arrives + dice.random() * 5, lambda: said if one.ends >= when else None)
