"""Runtime: what the driver needs of the place where its workers run (Ray, or a simulation), and the driver's settings.

Must not know: the driver, Ray. Invariant: only an implementation of `Runtime` knows where a worker runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from apcbatch.cluster.tasks import LEAST_GROUP_S
from apcbatch.cluster.wire import Handle, Key, Message, Unit
from apcbatch.engine.counters import Counters
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Request
from apcbatch.version import VERSION

WorkerId = int
MOST_UNITS = 16  # assigned to a worker at a time


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Resources of a worker. cpus: cores, and threads. gpus: 0 for a worker on the CPU. memory_bytes: reserved at the
    cluster's scheduler, 0 for none."""

    cpus: int = 1
    gpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts about a worker whose weights are loaded. node: where it runs; states need no network between workers of one
    node. max_request_tokens: of a prompt and its answer. max_running: requests that it batches, 0 if batching gains
    nothing. pool_bytes: room for snapshots. state_bytes: room on its node for states that others read. version,
    weights_digest, model_files, numerics, fingerprint: of the program, the weights, the model's other files, the
    arithmetic, and all of these; all workers of a run must agree in them."""

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
    max_running: int = 0
    pool_bytes: int = 4 << 30
    state_bytes: int = 8 << 30
    numerics: str = ""
    version: str = VERSION
    weights_digest: str = ""
    model_files: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker is ready for units."""

    worker: WorkerId
    facts: WorkerFacts


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a worker about a unit. Messages of one worker arrive in order."""

    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker has ended. reason: a clause for the user. with_node: its machine and the states there are lost too, so
    that no request is suspected."""

    worker: WorkerId
    reason: str
    with_node: bool = False


Event = Ready | Received | Lost


class Runtime(Protocol):
    """Starts workers and carries units and messages. No method raises for a worker that is gone: that is an event."""

    def spawn(self) -> WorkerId:
        """Request a worker; returns at once. It becomes Ready or Lost."""

    def submit(self, worker: WorkerId, unit: Unit, states: Mapping[Key, Handle]) -> None:
        """Queue a unit at a worker. states: the handle of each of its imports."""

    def wait(self, timeout_s: float) -> list[Event]:
        """The events since the last call, in order; returns at the first event, or empty after timeout_s."""

    def in_flight(self, worker: WorkerId) -> Collection[int] | None:
        """The numbers of the requests that a worker computes, or computed when it was lost; None if that is unknown.
        Called at most once per worker; returns within a bound."""

    def kill(self, worker: WorkerId) -> None:
        """End a worker. Its later messages are ignored, and it need not be reported as Lost."""

    def clock(self) -> float:
        """Seconds of the workers' clock."""

    def close(self) -> None:
        """End all workers and free everything."""


@dataclass(frozen=True)
class ClusterSettings:
    """workers: their number. most_states: held for other units in total (WorkerFacts.state_bytes bounds the bytes on a
    node). worker_timeout_s: maximum silence of a worker that has work; start_timeout_s: until it is ready.
    most_replaced: see WorkerTable. ahead_requests, ahead_tokens: read-ahead. idle_s: see Autoscaler. least_unit_s:
    minimum expected run time of a unit, unless little work is left. send_slack_s: seconds that computing a state again
    must save over sending it; its request's record then differs from that of one process."""

    workers: int
    most_states: int = 1 << 14
    worker_timeout_s: float = 300.0
    start_timeout_s: float = 600.0
    most_replaced: int = 8
    ahead_requests: int = 1 << 15
    ahead_tokens: int = 1 << 27
    idle_s: float = 60.0
    least_unit_s: float = LEAST_GROUP_S
    send_slack_s: float = 0.1


@dataclass(frozen=True)
class Hooks:
    """Callbacks of the driver. to_wire: encodes a request. can_run: whether a worker would accept it. held: the prefix
    keys whose snapshot is in every worker's store. conversation_of: the conversation of a request without a plan, None
    if it stands alone. say: gets a line when a worker comes or goes."""

    to_wire: Callable[[Request], Any]
    can_run: Callable[[Request, WorkerFacts], bool] = lambda request, facts: True
    held: Callable[[Collection[Key]], set[Key]] = lambda keys: set()
    conversation_of: Callable[[Request], Hashable] = lambda request: None
    say: Callable[[str], None] = lambda line: None


@dataclass
class ClusterCounters(Counters):
    """Sums of the workers' engine counters, under their names there; of peaks the highest of any worker. unique_tokens:
    distinct tokens that were computed. workers: see WorkerCounts."""

    workers: list[dict[str, Any]] = field(default_factory=list)

    def add(self, counted: Mapping[str, float]) -> None:
        """Add the counters of a unit."""
        for name, value in counted.items():
            if name.startswith("peak_") and name in _NUMBERS:
                setattr(self, name, max(getattr(self, name), int(value)))
            elif name in _NUMBERS:
                setattr(self, name, getattr(self, name) + int(value))
            elif name.removesuffix("_s") in self.seconds:
                self.seconds[name.removesuffix("_s")] += value


_OWN = {"workers", "seconds", "prefill_tokens", "decode_tokens", "unique_tokens"}
_NUMBERS = {one.name for one in fields(ClusterCounters)} - _OWN
