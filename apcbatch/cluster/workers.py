"""WorkerTable: the workers of a run, their assignments, and which are free. Autoscaler: the number of workers.

A unit is a group of requests that is assigned to a worker as a whole.

Invariants:
- A worker has enough units to fill its batch, and at most MOST_UNITS.
- Nothing is submitted to a worker that is known to have ended.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from apcbatch.cluster.plan_view import Assignment
from apcbatch.cluster.runtime import MOST_UNITS, Runtime, WorkerFacts, WorkerId
from apcbatch.cluster.scheduler import MOST_TOGETHER, GroupScheduler, UnplannedQueue
from apcbatch.cluster.tasks import Rates
from apcbatch.engine.serving import LOOK_AHEAD
from apcbatch.types import Result

LOAD_FACTOR = 1 + LOOK_AHEAD  # target number of requests of a worker, in multiples of max_running
MOST_IMPORTED = 0.5  # with imports of this share of its pool_bytes a worker gets no further unit
ASSIGN_AHEAD_S = 0.2  # the next unit is assigned this long before the expected end of the running one,
ASSIGN_AHEAD_SHARE = 0.1  # or this share of its run time
SAME = "put the same on every machine"
COMMON = (  # facts that all workers must share: description, field of WorkerFacts, remedy
    ("the version of apcbatch", "version", SAME),
    ("the model's weights", "weights_digest", SAME),
    ("the model's tokenizer, template or configuration", "model_files", SAME),
    ("the arithmetic of the kernels", "numerics", "take machines alike, or set `isa` or --dtype float32"),
    ("the fingerprint", "fingerprint", SAME),
)


@dataclass(slots=True, eq=False)
class Worker:
    """A worker, as the driver sees it.

    asked: time of its spawn. facts: None until it is ready. heard: time of its last message or assignment. assignments:
    its units, in the order they began. free: time from which another unit may be assigned. entry: number of its valid
    entry in the table's heaps. All times are those of Runtime.clock, in seconds.
    """

    id: WorkerId
    asked: float
    counts: WorkerCounts
    facts: WorkerFacts | None = None
    heard: float = 0.0
    assignments: deque[Assignment] = field(default_factory=deque)
    free: float = 0.0
    entry: int = 0

    @property
    def known(self) -> WorkerFacts:
        """Facts of a worker that is ready."""
        assert self.facts is not None, "only a worker that is ready has units"
        return self.facts

    @property
    def load(self) -> int:
        """Number of its unanswered requests."""
        return sum(assignment.left for assignment in self.assignments)

    def begin(self, assignment: Assignment, now: float) -> None:
        """Add a unit."""
        assignment.begun = self.heard = now
        self.assignments.append(assignment)
        self._when_free(now)

    def answered(self, assignment: Assignment, now: float) -> None:
        """Count an answered request of a unit."""
        assignment.left -= 1
        self._when_free(now)

    def end(self, assignment: Assignment, now: float) -> None:
        """Remove a unit. If it was the first, the run time of the next one counts from now."""
        was_first = self.assignments[0] is assignment
        self.assignments.remove(assignment)
        if was_first and self.assignments:
            self.assignments[0].begun = now
        self._when_free(now)

    def _when_free(self, now: float) -> None:
        """Set `free`: now while the batch has room; with a single unit, shortly before its expected end; otherwise, and
        with a group that must run alone, infinity."""
        num_units, self.free = len(self.assignments), now
        most_bytes = MOST_IMPORTED * self.known.pool_bytes
        has_room = (
            num_units < MOST_UNITS and sum(assignment.import_bytes for assignment in self.assignments) < most_bytes
        )
        has_room = has_room and not any(assignment.group.is_alone for assignment in self.assignments)
        if not num_units or (has_room and self.load < LOAD_FACTOR * self.known.max_running):
            return
        self.free = float("inf")
        if num_units == 1 and not self.assignments[0].group.is_alone:
            first = self.assignments[0]
            ahead = max(ASSIGN_AHEAD_S, ASSIGN_AHEAD_SHARE * first.expected_s)
            self.free = first.begun + first.expected_s - ahead


class WorkerTable:
    """The workers of one run.

    rates: their measured speed. all_counts: counts of every worker ever spawned. last_reason: why the last worker was
    lost.
    """

    def __init__(self, runtime: Runtime, number: int, most_replaced: int, say: Callable[[str], None]) -> None:
        """number: number of workers. most_replaced: maximum replacements spawned in a row without one becoming ready.
        say: receives a line when a worker starts or ends."""
        self._runtime, self._say, self._most_replaced = runtime, say, most_replaced
        self._replaced = 0
        self._num_vacant = 0  # workers released or lost, and not replaced
        self._all: dict[WorkerId, Worker] = {}
        self._first: WorkerFacts | None = None
        self._free: list[tuple[int, int, Worker]] = []  # (load, entry, worker)
        self._later: list[tuple[float, int, Worker]] = []  # (free, entry, worker)
        self._num_entries = 0
        self.rates = Rates()
        self.last_reason = "none was asked for"
        self.all_counts: list[WorkerCounts] = []
        for _ in range(number):
            self._ask()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all.values())

    def get(self, worker: WorkerId) -> Worker | None:
        """Return the worker with an id; None if it has ended."""
        return self._all.get(worker)

    @property
    def ready(self) -> list[Worker]:
        """Workers that are ready."""
        return [worker for worker in self._all.values() if worker.facts is not None]

    def add_ready(self, worker: Worker, facts: WorkerFacts) -> bool:
        """Mark a worker as ready.

        If it differs from the first worker in a fact of COMMON, end it and return False.
        """
        first = self._first = self._first or facts
        for what, fact, remedy in COMMON:
            if getattr(first, fact) != getattr(facts, fact):
                self._runtime.kill(worker.id)
                reason = f"{what} on {facts.node} differs from that on {first.node}; {remedy}"
                self.lose(worker, reason, is_replaced=False)
                return False
        worker.facts, worker.heard, self._replaced = facts, self._runtime.clock(), 0
        worker.counts.node, worker.counts.device = facts.node, facts.device
        worker.free = worker.heard
        self._queue(worker)
        self._say(
            f"worker {worker.id} is ready: {facts.device}, {facts.dtype}, {facts.threads} threads on {facts.node}"
        )
        return True

    def begin(self, worker: Worker, assignment: Assignment) -> None:
        """Assign a unit to a worker."""
        worker.begin(assignment, self._runtime.clock())
        self._queue(worker)

    def answered(self, worker: Worker, assignment: Assignment) -> bool:
        """Count an answered request of a unit. Return whether the worker has become free."""
        now, was_free = self._runtime.clock(), worker.free
        worker.answered(assignment, now)
        if (was_free <= now) == (worker.free <= now):
            return False
        self._queue(worker)
        return worker.free <= now

    def end(self, worker: Worker, assignment: Assignment) -> None:
        """Remove a unit that is done."""
        worker.end(assignment, self._runtime.clock())
        self._queue(worker)

    def first_free(self) -> Worker | None:
        """Return the free worker with the fewest unanswered requests; None if no worker is free."""
        self._update_free()
        while self._free and not self._is_valid(self._free[0]):
            heapq.heappop(self._free)
        return self._free[0][2] if self._free else None

    def free_workers(self) -> list[Worker]:
        """Return the free workers, those with the fewest unanswered requests first."""
        self._update_free()
        return [entry[2] for entry in sorted(filter(self._is_valid, self._free), key=lambda entry: entry[:2])]

    def next_free(self) -> float:
        """Return the time at which the next worker becomes free; infinity if unknown."""
        self._update_free()
        return self._later[0][0] if self._later else float("inf")

    def _update_free(self) -> None:
        """Move workers whose `free` time has come to the heap of free ones."""
        now = self._runtime.clock()
        while self._later and (self._later[0][0] <= now or not self._is_valid(self._later[0])):
            entry = heapq.heappop(self._later)
            if self._is_valid(entry):
                self._queue(entry[2])

    def _queue(self, worker: Worker) -> None:
        """Push a worker onto the heap of free workers, or onto that of later ones if `free` is a finite time ahead. Its
        earlier entries become invalid."""
        self._num_entries += 1
        worker.entry = self._num_entries
        if worker.free <= self._runtime.clock():
            heapq.heappush(self._free, (worker.load, worker.entry, worker))
        elif worker.free != float("inf"):
            heapq.heappush(self._later, (worker.free, worker.entry, worker))

    def _is_valid(self, pushed: tuple[float, int, Worker]) -> bool:
        _, entry, worker = pushed
        return worker.entry == entry and worker.id in self._all

    def silent(self, now: float, worker_s: float, start_s: float) -> Iterator[tuple[Worker, str]]:
        """Yield the workers that were silent for too long, each with the reason to end it.

        worker_s: maximum silence of a worker that has a unit. start_s: maximum time until a worker is ready.
        """
        for worker in list(self._all.values()):
            if worker.facts is None and now - worker.asked > start_s:
                yield worker, f"it was not ready after {start_s:g} s"
            elif worker.assignments and now - worker.heard > worker_s:
                yield worker, f"it said nothing for {worker_s:g} s while it had work"

    def lose(self, worker: Worker, reason: str, is_replaced: bool = True) -> None:
        """Remove a worker that has ended, and spawn a replacement unless most_replaced replacements in a row did not
        become ready. is_replaced: False to spawn none."""
        del self._all[worker.id]
        worker.counts.ending = LOST
        self.last_reason = reason
        ending = ""
        if is_replaced and self._replaced < self._most_replaced:
            self._replaced += 1
            ending = f"; worker {self._ask().id} takes its place"
        elif is_replaced:
            self._num_vacant += 1
        self._say(f"worker {worker.id} is lost: {reason}{ending}")

    def release(self, worker: Worker) -> None:
        """End an idle worker. `refill` may replace it later."""
        del self._all[worker.id]
        self._runtime.kill(worker.id)
        self._num_vacant += 1
        worker.counts.ending = LET_GO
        was = "has nothing left to do" if worker.facts is not None else "is not needed any more"
        self._say(f"worker {worker.id} {was} and is let go; {len(self._all)} are left")

    def refill(self, most: int) -> None:
        """Spawn at most `most` workers in place of those that were released or lost."""
        for _ in range(min(most, self._num_vacant, self._most_replaced - self._replaced)):
            self._replaced += 1
            self._num_vacant -= 1
            worker = self._ask()
            self._say(f"worker {worker.id} is asked for, since there is more to do again")

    def kill_all(self) -> None:
        """End every worker."""
        for worker in self._all:
            self._runtime.kill(worker)
        self._all.clear()

    def _ask(self) -> Worker:
        """Request a worker from the runtime."""
        id = self._runtime.spawn()
        worker = self._all[id] = Worker(id, self._runtime.clock(), WorkerCounts(id))
        self.all_counts.append(worker.counts)
        return worker


LOST, LET_GO = "lost", "let_go"


@dataclass(slots=True)
class WorkerCounts:
    """Work of one worker.

    node, device: empty until it is ready. units: completed units. requests: answered requests, errors included.
    prefill_tokens, decode_tokens: tokens computed for answers. cached_tokens: tokens restored. busy_s: sum of the
    answers' prefill and decode time. states_received: imports from another node. states_missing: imports that failed.
    requests_unfinished: requests unanswered when it was lost. ending: LOST, LET_GO (released when idle), or None.
    """

    id: int
    node: str = ""
    device: str = ""
    units: int = 0
    requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0
    states_received: int = 0
    states_missing: int = 0
    requests_unfinished: int = 0
    ending: str | None = None

    def add(self, result: Result) -> None:
        """Count a result."""
        self.requests += 1
        if result.error is None:
            self.prefill_tokens += result.computed_tokens
            self.decode_tokens += sum(max(0, len(answer.token_ids) - 1) for answer in result.answers)
            self.cached_tokens += result.cached_tokens
            self.busy_s += (result.prefill_ms + result.decode_ms) / 1e3

    def summary(self) -> dict[str, Any]:
        """Return the worker's entry in the run's summary. tokens_per_s: computed tokens per busy_s; None if busy_s is
        0."""
        tokens = self.prefill_tokens + self.decode_tokens
        return asdict(self) | {"tokens_per_s": tokens / self.busy_s if self.busy_s else None}


class Autoscaler:
    """Ends surplus workers that are idle for idle_s, except the last ready one, and replaces released or lost workers
    when there is work for them again.

    It spawns workers until there are min(a, b) idle ones, with a = ready units and b = units of unplanned requests plus
    the groups' expected run time over idle_s.
    """

    def __init__(
        self, workers: WorkerTable, scheduler: GroupScheduler, unplanned: UnplannedQueue, idle_s: float
    ) -> None:
        self._workers, self._scheduler, self._unplanned = workers, scheduler, unplanned
        self._idle_s = idle_s
        self._began: float | None = None

    def scale(self, now: float) -> list[Worker]:
        """Release or spawn workers, and return those released. Call it regularly while requests are unfinished."""
        self._began = now if self._began is None else self._began
        idle = [worker for worker in self._workers if not worker.assignments]
        num_unplanned = -(-len(self._unplanned) // MOST_TOGETHER)
        num_ready = len(self._scheduler.queue) + num_unplanned
        num_units = num_ready + len(list(self._scheduler.waiting))
        if len(idle) > num_units:
            return self._release(idle, len(idle) - num_units, now)
        num_worth = num_unplanned + int(self._scheduler.seconds / self._idle_s)
        self._workers.refill(min(num_ready, num_worth) - len(idle))
        return []

    def _release(self, idle: list[Worker], most: int, now: float) -> list[Worker]:
        """Release at most `most` workers: first those that are not ready, then those idle the longest."""
        began = self._began or 0.0
        since = {worker: max(worker.heard or worker.asked, began) for worker in idle}
        leaving = [worker for worker in idle if now - since[worker] >= self._idle_s]
        if not leaving:
            return []
        leaving.sort(key=lambda worker: (worker.facts is not None, since[worker]))
        gone: list[Worker] = []
        for worker in leaving:
            is_last = len(self._workers.ready) <= (worker.facts is not None)
            if len(gone) < most and not is_last:
                self._workers.release(worker)
                gone.append(worker)
        return gone
