"""Runtime: the driver's interface to the place where its workers run (Ray or a simulation); the driver's settings.

Invariant: only an implementation of `Runtime` knows where a worker runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from apcbatch.cluster.tasks import LEAST_GROUP_S, LEAST_SENT_TOKENS
from apcbatch.cluster.wire import Handle, Key, Message, Unit
from apcbatch.engine.counters import Counters
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Request
from apcbatch.version import VERSION

WorkerId = int
MOST_UNITS = 16  # maximum units assigned to a worker at a time


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Resources of a worker.

    cpus: number of cores and of threads. gpus: number of GPUs, 0 for a worker on the CPU. memory_bytes: memory reserved
    at the cluster's scheduler, 0 for none.
    """

    cpus: int
    gpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts about a worker whose weights are loaded.

    node: machine it runs on; workers of one node share states without the network. max_request_tokens: maximum tokens
    of a prompt and its answer. max_running: maximum requests in a batch, 0 if it computes one unit at a time.
    pool_bytes: capacity of its snapshot pool. reading_tokens: see JobEngine. state_bytes: capacity of its node for
    exported states.

    All workers of a run must agree in these: version (of the program), weights_digest, model_files (digest of the
    model's other files), numerics (arithmetic of the kernels) and fingerprint (see fingerprint.py).
    """

    fingerprint: str
    key_fingerprint: bytes
    node: str
    device: str
    dtype: str
    threads: int
    footprint: Footprint
    context_length: int | None
    vocab_size: int
    max_request_tokens: int
    max_running: int
    pool_bytes: int
    state_bytes: int = 8 << 30
    numerics: str = ""
    version: str = VERSION
    weights_digest: str = ""
    model_files: str = ""
    reading_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Event: a worker is ready for units."""

    worker: WorkerId
    facts: WorkerFacts


@dataclass(frozen=True, slots=True)
class Received:
    """Event: a worker has sent a message about a unit. Messages of one worker arrive in order."""

    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: a worker has ended.

    reason: a clause for the user. with_node: its machine is gone too, with the states there; then no request is
    suspected.
    """

    worker: WorkerId
    reason: str
    with_node: bool = False


Event = Ready | Received | Lost


class Runtime(Protocol):
    """Starts workers, and transports units and messages.

    No method raises because a worker has ended: `wait` reports that as an event.
    """

    def spawn(self) -> WorkerId:
        """Request a worker and return its id at once. A Ready or Lost event follows."""

    def submit(self, worker: WorkerId, unit: Unit, states: Mapping[Key, Handle]) -> None:
        """Queue a unit at a worker. states: handle of each import of the unit, by key."""

    def wait(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call, in order. Blocks until the first event, at most timeout_s."""

    def in_flight(self, worker: WorkerId) -> Collection[int] | None:
        """Return the numbers of the requests that a worker is computing, or was when it was lost; None if unknown.

        Call it at most once per worker. It returns within a bounded time.
        """

    def kill(self, worker: WorkerId) -> None:
        """End a worker at once. Its later messages are ignored, and no Lost event is required."""

    def clock(self) -> float:
        """Return the time in seconds, on the clock that all of the driver's timeouts use."""

    def close(self) -> None:
        """End all workers once they have finished writing their stores, and free all resources."""


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of the driver.

    workers: number of workers. worker_timeout_s: maximum silence of a worker that has a unit. start_timeout_s: maximum
    time until a worker is ready. ahead_requests, ahead_tokens: read-ahead limits. least_unit_s: minimum expected run
    time of a unit, unless little work is left.

    least_sent_tokens: a group waits for a state of another group only if no ancestor of the state, less than this many
    tokens above it, serves in its place; the tokens in between, less than a fourth of those that the request computes,
    are then computed again. Such a request reports fewer cached tokens than in a run of one process.
    """

    workers: int
    worker_timeout_s: float = 300.0
    start_timeout_s: float = 600.0
    ahead_requests: int = 1 << 15
    ahead_tokens: int = 1 << 27
    least_unit_s: float = LEAST_GROUP_S
    least_sent_tokens: int = LEAST_SENT_TOKENS


@dataclass(frozen=True)
class Hooks:
    """Callbacks of the driver.

    to_wire: encodes a request. held: returns the subset of the prefix keys whose snapshot is in every worker's store.
    conversation_of: returns the id of the conversation of a request without a plan; None if it has no conversation.
    say: receives a line when a worker starts or ends.
    """

    to_wire: Callable[[Request], Any]
    held: Callable[[Collection[Key]], set[Key]] = lambda keys: set()
    conversation_of: Callable[[Request], Hashable] = lambda request: None
    say: Callable[[str], None] = lambda line: None


@dataclass
class ClusterCounters(Counters):
    """Engine counters summed over all workers. A counter that begins with `peak_` is the maximum over the workers.

    unique_tokens: number of distinct tokens computed. workers: one entry per worker, see WorkerCounts.summary.
    """

    workers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def total(cls, counters: Iterable[Counters]) -> ClusterCounters:
        """Sum the counters of workers, except unique_tokens, and drafts_saved_s, an estimate that has no sum."""
        found = cls()
        for one in counters:
            for name in _SUMMED:
                together = max if name.startswith("peak_") else int.__add__
                setattr(found, name, together(getattr(found, name), getattr(one, name)))
            for phase, seconds in one.seconds.items():
                found.seconds[phase] += seconds
            for source, counts in one.drafts.items():
                drafted, accepted = found.drafts.get(source, (0, 0))
                found.drafts[source] = drafted + counts[0], accepted + counts[1]
        return found


_SUMMED = {one.name for one in fields(Counters)} - {
    "seconds", "drafts", "drafts_saved_s", "unique_tokens", "unique_tokens_is_bound",
}  # fmt: skip
