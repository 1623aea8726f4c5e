"""The workers: who is there, what each one has to do, who has been silent for too long, whom to replace.

Must not know: what units hold. Invariants: a worker has so many units that it can run as many requests at a time as it
takes, and no more than MOST_UNITS; what is known to be gone is never asked again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from apcbatch.cluster.items import Group, Item, State
from apcbatch.cluster.rates import Rates
from apcbatch.cluster.seam import MOST_UNITS, Seam, WorkerFacts, WorkerId, WorkerKind
from apcbatch.cluster.unit import Key
from apcbatch.engine.serving import LOOK_AHEAD

FILLING = 1 + LOOK_AHEAD  # requests of a worker, over those that it runs at a time: as many as an engine looks among
TYPICAL = (1000, 100)  # tokens of prompts and of answers
MOST_IMPORTED = 0.5  # of a worker's room for snapshots, by what several units bring along
HAND_OUT_AHEAD_S = 0.2  # a unit waits at a worker this long before the one that runs should end,
HAND_OUT_AHEAD_SHARE = 0.1  # or this share of it


@dataclass(slots=True, eq=False)
class Errand:
    """A unit at a worker. import_bytes: of snapshots, for the states that come along. left: requests without an answer.
    begun: when it became the first there. expected_s: how long it should take."""

    unit: int
    group: Group
    items: dict[int, Item]
    exports: dict[Key, State]
    expected_s: float
    import_bytes: int = 0
    left: int = 0
    begun: float = 0.0

    def __post_init__(self) -> None:
        self.left = len(self.items)


@dataclass(slots=True, eq=False)
class Worker:
    """A worker that was asked for. facts: None until it is ready. heard: when it last said or was given something.
    free: when it should be given another unit."""

    id: WorkerId
    kind: WorkerKind
    asked: float
    facts: WorkerFacts | None = None
    heard: float = 0.0
    errands: deque[Errand] = field(default_factory=deque)
    free: float = 0.0

    @property
    def class_(self) -> str:
        assert self.facts is not None, "a worker has a class once it is ready"
        return self.facts.fingerprint

    @property
    def load(self) -> int:
        """Its requests without an answer."""
        return sum(errand.left for errand in self.errands)

    def begin(self, errand: Errand, now: float) -> None:
        """It is given a unit."""
        errand.begun = self.heard = now
        self.errands.append(errand)
        self._when_free(now)

    def answered(self, errand: Errand, now: float) -> bool:
        """A request of a unit is answered. Whether it is since then that another unit should be given."""
        errand.left -= 1
        was_free = self.free <= now
        self._when_free(now)
        return not was_free and self.free <= now

    def end(self, errand: Errand, now: float) -> None:
        """A unit is done; the next one runs."""
        was_first = self.errands[0] is errand
        self.errands.remove(errand)
        if was_first and self.errands:
            self.errands[0].begun = now
        self._when_free(now)

    def _when_free(self, now: float) -> None:
        """At once while it could run more than it has; else shortly before its only unit should end."""
        assert self.facts is not None, "a worker that has units has said what it is"
        num_units, self.free = len(self.errands), now
        most_bytes = MOST_IMPORTED * self.facts.pool_bytes
        has_room = num_units < MOST_UNITS and sum(errand.import_bytes for errand in self.errands) < most_bytes
        if not num_units or (has_room and self.load < FILLING * self.facts.max_running):
            return
        self.free = float("inf")
        if num_units == 1:
            first = self.errands[0]
            ahead = max(HAND_OUT_AHEAD_S, HAND_OUT_AHEAD_SHARE * first.expected_s)
            self.free = first.begun + first.expected_s - ahead


class Crew:
    """The workers of one run. num_lost: workers that ended on their own. say: gets a line when one comes or goes."""

    def __init__(self, seam: Seam, kinds: Sequence[WorkerKind], most_replaced: int, say: Callable[[str], None]) -> None:
        """kinds: one for each worker. most_replaced: workers that are asked for in place of lost ones without one
        becoming ready in between."""
        self._seam, self._say, self._most_replaced = seam, say, most_replaced
        self._replaced = 0
        self._all: dict[WorkerId, Worker] = {}
        self._rates: dict[str, Rates] = {}
        self.wanted = len(kinds)
        self.num_lost = 0
        self.last_reason = "none was asked for"
        for kind in kinds:
            self._ask(kind)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all.values())

    def get(self, worker: WorkerId) -> Worker | None:
        """A worker that is not known to be gone."""
        return self._all.get(worker)

    @property
    def ready(self) -> list[Worker]:
        """Those that take units."""
        return [worker for worker in self._all.values() if worker.facts is not None]

    def rates(self, class_: str) -> Rates:
        """How fast workers of a class are."""
        return self._rates[class_]

    def typical_rates(self) -> Rates:
        """Of the class with the most workers."""
        classes = [worker.class_ for worker in self.ready]
        if not classes:
            return next(iter(self._rates.values()), Rates())
        return self._rates[max(sorted(set(classes)), key=classes.count)]

    def capacities(self) -> dict[str, float]:
        """By class, how much of a typical mixture of tokens its workers do in a second."""
        classes = [worker.class_ for worker in self._all.values() if worker.facts is not None]
        return {class_: classes.count(class_) / self._rates[class_].seconds(*TYPICAL) for class_ in set(classes)}

    def welcome(self, worker: Worker, facts: WorkerFacts) -> None:
        """A worker is ready."""
        worker.facts, worker.heard, self._replaced = facts, self._seam.clock(), 0
        self._rates.setdefault(facts.fingerprint, Rates(facts.prefill_tokens_per_s, facts.decode_tokens_per_s))
        self._say(
            f"worker {worker.id} is ready: {facts.device}, {facts.dtype}, {facts.threads} threads on {facts.node}"
        )

    def takers(self, now: float, num_unanswered: int) -> list[Worker]:
        """Workers that should be given a unit now: those with the least to do first, and none that has more than its
        fair share of all unanswered requests."""
        most = num_unanswered / max(1, len(self._all))
        takers = [
            worker
            for worker in self._all.values()
            if worker.free <= now and worker.facts is not None and (not worker.errands or worker.load <= most)
        ]
        return sorted(takers, key=_least_work_first)

    def next_free(self, now: float) -> float:
        """When the next worker should be given a unit that should not be yet; infinity if that is not known."""
        return min([worker.free for worker in self._all.values() if worker.free > now], default=float("inf"))

    def silent(self, now: float, worker_s: float, start_s: float) -> Iterator[tuple[Worker, str]]:
        """Workers that said nothing for too long, each with the reason to give it up."""
        for worker in list(self._all.values()):
            if worker.facts is None and now - worker.asked > start_s:
                yield worker, f"it was not ready after {start_s:g} s"
            elif worker.errands and now - worker.heard > worker_s:
                yield worker, f"it said nothing for {worker_s:g} s while it had work"

    def lose(self, worker: Worker, reason: str) -> None:
        """A worker is gone; another one is asked for in its place, if that makes sense."""
        del self._all[worker.id]
        self.num_lost += 1
        self.last_reason = reason
        ending = ""
        if self._replaced < self._most_replaced:
            self._replaced += 1
            ending = f"; worker {self._ask(worker.kind).id} takes its place"
        self._say(f"worker {worker.id} is lost: {reason}{ending}")

    def kill_all(self) -> None:
        """End every worker."""
        for worker in self._all:
            self._seam.kill(worker)
        self._all.clear()

    def _ask(self, kind: WorkerKind) -> Worker:
        worker = Worker(self._seam.spawn(kind), kind, self._seam.clock())
        self._all[worker.id] = worker
        return worker


def _least_work_first(worker: Worker) -> tuple[int, float]:
    return worker.load, worker.free
