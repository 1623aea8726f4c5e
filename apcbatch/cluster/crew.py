"""The workers: who is there, what each one has to do, who has been silent for too long, whom to replace.

Must not know: what units hold. Invariants: a worker has so many units that it can run as many requests at a time as it
takes, and no more than MOST_UNITS; what is known to be gone is never asked again.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from apcbatch.cluster.items import Group, Item, State
from apcbatch.cluster.rates import Rates
from apcbatch.cluster.seam import MOST_UNITS, Seam, WorkerFacts, WorkerId, WorkerKind
from apcbatch.cluster.tally import LET_GO, LOST, Tally
from apcbatch.cluster.unit import Key
from apcbatch.engine.serving import LOOK_AHEAD

FILLING = 1 + LOOK_AHEAD  # requests of a worker, over those that it runs at a time: as many as an engine looks among
TYPICAL = (1000, 100)  # tokens of prompts and of answers
MOST_IMPORTED = 0.5  # of a worker's room for snapshots, by what several units bring along
HAND_OUT_AHEAD_S = 0.2  # a unit waits at a worker this long before the one that runs should end,
HAND_OUT_AHEAD_SHARE = 0.1  # or this share of it
STRANGE = {  # what all workers must have in common, and the fact that tells
    "the version of apcbatch": "version",
    "the model's weights": "weights_digest",
    "the model's tokenizer, template or configuration": "model_files",
}


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
    free: when it should be given another unit. place: of its only valid entry in the crew's heaps."""

    id: WorkerId
    kind: WorkerKind
    asked: float
    tally: Tally
    facts: WorkerFacts | None = None
    heard: float = 0.0
    errands: deque[Errand] = field(default_factory=deque)
    free: float = 0.0
    place: int = 0

    @property
    def known(self) -> WorkerFacts:
        """The facts of one that is ready."""
        assert self.facts is not None, "only a worker that is ready has units"
        return self.facts

    @property
    def class_(self) -> str:
        return self.known.fingerprint

    @property
    def load(self) -> int:
        """Its requests without an answer."""
        return sum(errand.left for errand in self.errands)

    def begin(self, errand: Errand, now: float) -> None:
        """It is given a unit."""
        errand.begun = self.heard = now
        self.errands.append(errand)
        self._when_free(now)

    def answered(self, errand: Errand, now: float) -> None:
        """A request of a unit is answered."""
        errand.left -= 1
        self._when_free(now)

    def end(self, errand: Errand, now: float) -> None:
        """A unit is done; the next one runs."""
        was_first = self.errands[0] is errand
        self.errands.remove(errand)
        if was_first and self.errands:
            self.errands[0].begun = now
        self._when_free(now)

    def _when_free(self, now: float) -> None:
        """At once while it could run more than it has; else shortly before its only unit should end."""
        num_units, self.free = len(self.errands), now
        most_bytes = MOST_IMPORTED * self.known.pool_bytes
        has_room = num_units < MOST_UNITS and sum(errand.import_bytes for errand in self.errands) < most_bytes
        has_room = has_room and not any(errand.group.is_alone for errand in self.errands)
        if not num_units or (has_room and self.load < FILLING * self.known.max_running):
            return
        self.free = float("inf")
        if num_units == 1 and not self.errands[0].group.is_alone:
            first = self.errands[0]
            ahead = max(HAND_OUT_AHEAD_S, HAND_OUT_AHEAD_SHARE * first.expected_s)
            self.free = first.begun + first.expected_s - ahead


class Crew:
    """The workers of one run. num_lost: workers that ended on their own. tallies: of all that were ever asked for. say:
    gets a line when one comes or goes."""

    def __init__(self, seam: Seam, kinds: Sequence[WorkerKind], most_replaced: int, say: Callable[[str], None]) -> None:
        """kinds: one for each worker. most_replaced: workers that are asked for in place of lost ones without one
        becoming ready in between."""
        self._seam, self._say, self._most_replaced = seam, say, most_replaced
        self._replaced = 0
        self._vacant: list[WorkerKind] = []  # places that nobody is asked for
        self._all: dict[WorkerId, Worker] = {}
        self._rates: dict[str, Rates] = {}
        self._first: WorkerFacts | None = None
        self._num_ready: Counter[str] = Counter()  # by class
        self._takers: dict[str, list[tuple[int, int, Worker]]] = {}  # by class: the least to do first
        self._later: list[tuple[float, int, Worker]] = []  # the first to be free first
        self._num_places = 0
        self.num_lost = 0
        self.last_reason = "none was asked for"
        self.tallies: list[Tally] = []
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
        if not self._num_ready:
            return next(iter(self._rates.values()), Rates())
        return self._rates[max(sorted(self._num_ready), key=lambda class_: self._num_ready[class_])]

    def capacities(self) -> dict[str, float]:
        """By class, how much of a typical mixture of tokens its workers do in a second."""
        return {class_: number / self._rates[class_].seconds(*TYPICAL) for class_, number in self._num_ready.items()}

    def welcome(self, worker: Worker, facts: WorkerFacts) -> bool:
        """A worker is ready. False if it is another program or has another model than the first one: it is ended."""
        first = self._first = self._first or facts
        strange = [name for name, of in STRANGE.items() if getattr(first, of) != getattr(facts, of)]
        if strange:
            self._seam.kill(worker.id)
            what = f"{strange[0]} on {facts.node} differs from that on {first.node}"
            self.lose(worker, f"{what}; put the same on every machine", is_replaced=False)
            return False
        worker.facts, worker.heard, self._replaced = facts, self._seam.clock(), 0
        worker.tally.node, worker.tally.device = facts.node, facts.device
        self._rates.setdefault(facts.fingerprint, Rates(facts.prefill_tokens_per_s, facts.decode_tokens_per_s))
        self._num_ready[facts.fingerprint] += 1
        worker.free = worker.heard
        self._queue(worker)
        self._say(
            f"worker {worker.id} is ready: {facts.device}, {facts.dtype}, {facts.threads} threads on {facts.node}"
        )
        if facts.numerics != first.numerics:
            self._say(
                f"worker {worker.id} computes by {facts.numerics}, not by {first.numerics} as the first: the last bits "
                "of its answers differ, they share no states with the others', and their records say `numerics`"
            )
        return True

    def begin(self, worker: Worker, errand: Errand) -> None:
        """A worker is given a unit."""
        worker.begin(errand, self._seam.clock())
        self._queue(worker)

    def answered(self, worker: Worker, errand: Errand) -> bool:
        """A request of a unit is answered. Whether it is since then that the worker should be given another unit."""
        now, was_free = self._seam.clock(), worker.free
        worker.answered(errand, now)
        if (was_free <= now) == (worker.free <= now):
            return False
        self._queue(worker)
        return worker.free <= now

    def end(self, worker: Worker, errand: Errand) -> None:
        """A unit is done."""
        worker.end(errand, self._seam.clock())
        self._queue(worker)

    def classes(self) -> list[str]:
        """Those of the workers that take units."""
        return list(self._num_ready)

    def taker(self, class_: str) -> Worker | None:
        """Of the workers of a class that should be given a unit now, the one with the least to do."""
        self._free_now()
        takers = self._takers.get(class_, [])
        while takers and not self._is_valid(takers[0]):
            heapq.heappop(takers)
        return takers[0][2] if takers else None

    def takers(self) -> list[Worker]:
        """Workers that should be given a unit now: those with the least to do first."""
        self._free_now()
        entries = [entry for takers in self._takers.values() for entry in takers if self._is_valid(entry)]
        return [worker for _, _, worker in sorted(entries, key=lambda entry: entry[:2])]

    def next_free(self) -> float:
        """When the next worker should be given a unit that should not be yet; infinity if that is not known."""
        self._free_now()
        return self._later[0][0] if self._later else float("inf")

    def _free_now(self) -> None:
        """Let those take units whose time has come."""
        now = self._seam.clock()
        while self._later and (self._later[0][0] <= now or not self._is_valid(self._later[0])):
            entry = heapq.heappop(self._later)
            if self._is_valid(entry):
                self._queue(entry[2])

    def _queue(self, worker: Worker) -> None:
        """Enter a worker anew where it belongs; what was entered before does not count."""
        self._num_places += 1
        worker.place = self._num_places
        if worker.free <= self._seam.clock():
            heapq.heappush(self._takers.setdefault(worker.class_, []), (worker.load, worker.place, worker))
        elif worker.free != float("inf"):
            heapq.heappush(self._later, (worker.free, worker.place, worker))

    def _is_valid(self, entry: tuple[float, int, Worker]) -> bool:
        _, place, worker = entry
        return worker.place == place and worker.id in self._all

    def silent(self, now: float, worker_s: float, start_s: float) -> Iterator[tuple[Worker, str]]:
        """Workers that said nothing for too long, each with the reason to give it up."""
        for worker in list(self._all.values()):
            if worker.facts is None and now - worker.asked > start_s:
                yield worker, f"it was not ready after {start_s:g} s"
            elif worker.errands and now - worker.heard > worker_s:
                yield worker, f"it said nothing for {worker_s:g} s while it had work"

    def lose(self, worker: Worker, reason: str, is_replaced: bool = True) -> None:
        """A worker is gone; another one is asked for in its place, if that makes sense."""
        self._forget(worker)
        self.num_lost += 1
        worker.tally.ending = LOST
        self.last_reason = reason
        ending = ""
        if is_replaced and self._replaced < self._most_replaced:
            self._replaced += 1
            ending = f"; worker {self._ask(worker.kind).id} takes its place"
        elif is_replaced:
            self._vacant.append(worker.kind)
        self._say(f"worker {worker.id} is lost: {reason}{ending}")

    def let_go(self, worker: Worker) -> None:
        """End a worker that has nothing to do. Others may be asked for in its place later."""
        self._forget(worker)
        self._seam.kill(worker.id)
        self._vacant.append(worker.kind)
        worker.tally.ending = LET_GO
        was = "has nothing left to do" if worker.facts is not None else "is not needed any more"
        self._say(f"worker {worker.id} {was} and is let go; {len(self._all)} are left")

    def fill(self, most: int) -> None:
        """Ask for so many of those again that were let go or lost, as far as that makes sense."""
        for _ in range(min(most, len(self._vacant), self._most_replaced - self._replaced)):
            self._replaced += 1
            worker = self._ask(self._vacant.pop())
            self._say(f"worker {worker.id} is asked for, since there is more to do again")

    def kill_all(self) -> None:
        """End every worker."""
        for worker in self._all:
            self._seam.kill(worker)
        self._all.clear()
        self._num_ready.clear()

    def _forget(self, worker: Worker) -> None:
        del self._all[worker.id]
        if worker.facts is not None:
            self._num_ready -= Counter((worker.class_,))

    def _ask(self, kind: WorkerKind) -> Worker:
        id = self._seam.spawn(kind)
        worker = self._all[id] = Worker(id, kind, self._seam.clock(), Tally(id))
        self.tallies.append(worker.tally)
        return worker
