"""The seam between the driver and wherever its workers run: Ray, or a simulation in virtual time.

Must not know: the driver, Ray. Invariant: nothing but an implementation of `Seam` knows where a worker runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from apcbatch.cluster.unit import Handle, Key, Message, Unit
from apcbatch.plan.footprint import Footprint
from apcbatch.version import VERSION

WorkerId = int
MOST_UNITS = 16  # that a worker is given at a time


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What to ask for. cpus: cores, which are also its threads. gpus: 0 for a worker on the CPU. memory_bytes: declared
    to whoever places workers; 0 for nothing declared."""

    cpus: int = 1
    gpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of itself once its weights are loaded. node: where it runs; states need no network between
    workers of one node. max_request_tokens: of a prompt and its answer. max_running: requests that it runs at a time
    and hardly slower than one alone, 0 where each takes its own time. pool_bytes: room for snapshots. state_bytes: room
    on its node for states that others read. version, weights_digest, model_files, numerics, fingerprint: of the
    program, the model's weights and other files, the arithmetic, and all that snapshots depend on; they must be those
    of the other workers."""

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
    """A worker takes units from now on."""

    worker: WorkerId
    facts: WorkerFacts


@dataclass(frozen=True, slots=True)
class Said:
    """A worker said something about a unit. What one worker says comes in its order."""

    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone. reason: a clause for the user. with_node: its machine went, and every state that lay there, so
    that no request is to blame."""

    worker: WorkerId
    reason: str
    with_node: bool = False


Event = Ready | Said | Lost


class Seam(Protocol):
    """Where workers run. Nothing here raises for a worker that is gone: that is an event."""

    def spawn(self) -> WorkerId:
        """Ask for a worker; returns at once. It becomes Ready or is Lost."""

    def submit(self, worker: WorkerId, unit: Unit, states: Mapping[Key, Handle]) -> None:
        """Queue a unit at a worker, which works on one after the other. states: one for each of its imports."""

    def wait(self, timeout_s: float) -> list[Event]:
        """What has happened, in order; returns as soon as there is anything, and empty after timeout_s."""

    def at_work(self, worker: WorkerId) -> Collection[int] | None:
        """The numbers of the requests that a worker's engine is at, or was when it was lost; None if nobody knows.
        Asked at most once of each worker; bounded."""

    def kill(self, worker: WorkerId) -> None:
        """End a worker; nothing that it still says counts. It need not be reported as lost."""

    def clock(self) -> float:
        """Seconds, as the workers' time passes."""

    def close(self) -> None:
        """End all workers and let go of everything."""
