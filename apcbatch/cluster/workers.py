"""WorkerTable: the workers of a run, their assignments, and which of them may get more.

A unit is a group of requests that is assigned to a worker as a whole.

Invariants:
- A worker has enough requests to fill its batch, and at most MOST_UNITS units.
- Nothing is submitted to a worker that is known to have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from apcbatch.cluster.plan_view import Assignment
from apcbatch.cluster.runtime import MOST_UNITS, Runtime, WorkerFacts, WorkerId
from apcbatch.cluster.tasks import Rates
from apcbatch.engine.serving import LOOK_AHEAD
from apcbatch.types import Result

LOAD_FACTOR = 1 + LOOK_AHEAD  # target number of requests of a worker, in multiples of max_running
MOST_IMPORTED = 0.5  # with imports of this share of its pool_bytes a worker gets no further unit
MOST_REPLACED = 8  # maximum replacements spawned in a row without one becoming ready
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
    its units, in the order they began. Times are those of Runtime.clock, in seconds.
    """

    id: WorkerId
    asked: float
    counts: WorkerCounts
    facts: WorkerFacts | None = None
    heard: float = 0.0
    assignments: list[Assignment] = field(default_factory=list)

    @property
    def known(self) -> WorkerFacts:
        """Facts of a worker that is ready."""
        assert self.facts is not None, "only a worker that is ready has units"
        return self.facts

    @property
    def load(self) -> int:
        """Number of its unanswered requests."""
        return sum(assignment.left for assignment in self.assignments)

    @property
    def has_room(self) -> bool:
        """Whether another unit may be assigned: it has none, or too few requests to fill its batch.

        A group that must run alone, MOST_UNITS units, or many imports leave no room.
        """
        units = self.assignments
        if not units:
            return True
        if units[0].group.is_alone or len(units) == MOST_UNITS or self.load >= LOAD_FACTOR * self.known.max_running:
            return False
        return sum(one.import_bytes for one in units) < MOST_IMPORTED * self.known.pool_bytes


class WorkerTable:
    """The workers of one run.

    rates: their measured speed. all_counts: counts of every worker ever spawned. last_reason: why the last worker was
    lost.
    """

    def __init__(self, runtime: Runtime, number: int, say: Callable[[str], None]) -> None:
        """number: number of workers. say: receives a line when a worker starts or ends."""
        self._runtime, self._say = runtime, say
        self._replaced = 0
        self._all: dict[WorkerId, Worker] = {}
        self._first: WorkerFacts | None = None
        self._free: dict[WorkerId, Worker] = {}
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

    def add_ready(self, worker: Worker, facts: WorkerFacts) -> None:
        """Mark a worker as ready. End it if it differs from the first worker in a fact of COMMON."""
        first = self._first = self._first or facts
        for what, fact, remedy in COMMON:
            if getattr(first, fact) != getattr(facts, fact):
                self._runtime.kill(worker.id)
                reason = f"{what} on {facts.node} differs from that on {first.node}; {remedy}"
                self.lose(worker, reason, is_replaced=False)
                return
        worker.facts, worker.heard, self._replaced = facts, self._runtime.clock(), 0
        worker.counts.node, worker.counts.device = facts.node, facts.device
        self._update(worker)
        self._say(
            f"worker {worker.id} is ready: {facts.device}, {facts.dtype}, {facts.threads} threads on {facts.node}"
        )

    def begin(self, worker: Worker, assignment: Assignment) -> None:
        """Assign a unit to a worker."""
        worker.heard = self._runtime.clock()
        worker.assignments.append(assignment)
        self._update(worker)

    def answered(self, worker: Worker, assignment: Assignment) -> None:
        """Count an answered request of a unit."""
        assignment.left -= 1
        self._update(worker)

    def end(self, worker: Worker, assignment: Assignment) -> None:
        """Remove a unit that is done."""
        worker.assignments.remove(assignment)
        self._update(worker)

    def free(self) -> list[Worker]:
        """Return the workers with room, those with the fewest unanswered requests first."""
        return sorted(self._free.values(), key=lambda worker: worker.load)

    def _update(self, worker: Worker) -> None:
        if worker.has_room:
            self._free[worker.id] = worker
        else:
            self._free.pop(worker.id, None)

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
        """Remove a worker that has ended, and spawn a replacement, except after MOST_REPLACED in a row of which none
        became ready. is_replaced: False to spawn none."""
        del self._all[worker.id]
        self._free.pop(worker.id, None)
        worker.counts.ending = "lost"
        self.last_reason = reason
        ending = ""
        if is_replaced and self._replaced < MOST_REPLACED:
            self._replaced += 1
            ending = f"; worker {self._ask().id} takes its place"
        self._say(f"worker {worker.id} is lost: {reason}{ending}")

    def kill_busy(self) -> None:
        """End every worker that has unanswered requests."""
        for worker in [one for one in self._all.values() if one.load]:
            self._runtime.kill(worker.id)
            del self._all[worker.id]
            self._free.pop(worker.id, None)

    def _ask(self) -> Worker:
        """Request a worker from the runtime."""
        id = self._runtime.spawn()
        worker = self._all[id] = Worker(id, self._runtime.clock(), WorkerCounts(id))
        self.all_counts.append(worker.counts)
        return worker


@dataclass(slots=True)
class WorkerCounts:
    """Work of one worker.

    node, device: empty until it is ready. units: completed units. requests: answered requests, errors included.
    prefill_tokens, decode_tokens: tokens computed for answers. cached_tokens: tokens restored. busy_s: sum of the
    answers' prefill and decode time. states_received: imports from another node. states_missing: imports that failed.
    requests_unfinished: requests unanswered when it was lost. ending: `lost` or None.
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
