"""The workers: who is there, what each one has to do, who has been silent for too long, whom to replace.

Must not know: what units hold. Invariants: a worker has so many units that it can run as many requests at a time as it
takes, and no more than MOST_UNITS; what is known to be gone is never asked again.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from apcbatch.cluster.items import Group, Item, State
from apcbatch.cluster.rates import Rates
from apcbatch.cluster.seam import MOST_UNITS, Seam, WorkerFacts, WorkerId
from apcbatch.cluster.tally import LET_GO, LOST, Tally
from apcbatch.cluster.unit import Key
from apcbatch.engine.serving import LOOK_AHEAD

FILLING = 1 + LOOK_AHEAD  # requests of a worker, over those that it runs at a time: as many as an engine looks among
MOST_IMPORTED = 0.5  # of a worker's room for snapshots, by what several units bring along
HAND_OUT_AHEAD_S = 0.2  # a unit waits at a worker this long before the one that runs should end,
HAND_OUT_AHEAD_SHARE = 0.1  # or this share of it
SAME = "put the same on every machine"
COMMON = (  # what all workers must have in common, the fact that tells, and what to do where it differs
    ("the version of apcbatch", "version", SAME),
    ("the model's weights", "weights_digest", SAME),
    ("the model's tokenizer, template or configuration", "model_files", SAME),
    ("the arithmetic of the kernels", "numerics", "take machines alike, or set `isa` or --dtype float32"),
    ("the fingerprint", "fingerprint", SAME),
)


@dataclass(slots=True, eq=False)
class Errand:
    """A unit assigned to a worker. exports: states not yet received. import_bytes: total size of the imported states.
    left: requests without an answer. begun: time at which it became the worker's first unit. expected_s: expected run
    time."""

    unit: int
    group: Group
    items: dict[int, Item]
    exports: dict[Key, State]
    imports: dict[Key, State]
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
    """The workers of one run. rates: how fast they are. num_lost: workers that ended on their own. tallies: of all that
    were ever asked for. say: gets a line when one comes or goes."""

    def __init__(self, seam: Seam, number: int, most_replaced: int, say: Callable[[str], None]) -> None:
        """number: of workers. most_replaced: workers that are asked for in place of lost ones without one
        becoming ready in between."""
        self._seam, self._say, self._most_replaced = seam, say, most_replaced
        self._replaced = 0
        self._num_vacant = 0  # places that nobody is asked for
        self._all: dict[WorkerId, Worker] = {}
        self._first: WorkerFacts | None = None
        self._takers: list[tuple[int, int, Worker]] = []  # the least to do first
        self._later: list[tuple[float, int, Worker]] = []  # the first to be free first
        self._num_places = 0
        self.rates = Rates()
        self.num_lost = 0
        self.last_reason = "none was asked for"
        self.tallies: list[Tally] = []
        for _ in range(number):
            self._ask()

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

    def welcome(self, worker: Worker, facts: WorkerFacts) -> bool:
        """A worker is ready. False if it is another program or has another model than the first one: it is ended."""
        first = self._first = self._first or facts
        for what, fact, remedy in COMMON:
            if getattr(first, fact) != getattr(facts, fact):
                self._seam.kill(worker.id)
                reason = f"{what} on {facts.node} differs from that on {first.node}; {remedy}"
                self.lose(worker, reason, is_replaced=False)
                return False
        worker.facts, worker.heard, self._replaced = facts, self._seam.clock(), 0
        worker.tally.node, worker.tally.device = facts.node, facts.device
        worker.free = worker.heard
        self._queue(worker)
        self._say(
            f"worker {worker.id} is ready: {facts.device}, {facts.dtype}, {facts.threads} threads on {facts.node}"
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

    def taker(self) -> Worker | None:
        """Of the workers that should be given a unit now, the one with the least to do."""
        self._free_now()
        while self._takers and not self._is_valid(self._takers[0]):
            heapq.heappop(self._takers)
        return self._takers[0][2] if self._takers else None

    def takers(self) -> list[Worker]:
        """Workers that should be given a unit now: those with the least to do first."""
        self._free_now()
        return [entry[2] for entry in sorted(filter(self._is_valid, self._takers), key=lambda entry: entry[:2])]

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
            heapq.heappush(self._takers, (worker.load, worker.place, worker))
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
            ending = f"; worker {self._ask().id} takes its place"
        elif is_replaced:
            self._num_vacant += 1
        self._say(f"worker {worker.id} is lost: {reason}{ending}")

    def let_go(self, worker: Worker) -> None:
        """End a worker that has nothing to do. Others may be asked for in its place later."""
        self._forget(worker)
        self._seam.kill(worker.id)
        self._num_vacant += 1
        worker.tally.ending = LET_GO
        was = "has nothing left to do" if worker.facts is not None else "is not needed any more"
        self._say(f"worker {worker.id} {was} and is let go; {len(self._all)} are left")

    def fill(self, most: int) -> None:
        """Ask for so many of those again that were let go or lost, as far as that makes sense."""
        for _ in range(min(most, self._num_vacant, self._most_replaced - self._replaced)):
            self._replaced += 1
            self._num_vacant -= 1
            worker = self._ask()
            self._say(f"worker {worker.id} is asked for, since there is more to do again")

    def kill_all(self) -> None:
        """End every worker."""
        for worker in self._all:
            self._seam.kill(worker)
        self._all.clear()

    def _forget(self, worker: Worker) -> None:
        del self._all[worker.id]

    def _ask(self) -> Worker:
        id = self._seam.spawn()
        worker = self._all[id] = Worker(id, self._seam.clock(), Tally(id))
        self.tallies.append(worker.tally)
        return worker
