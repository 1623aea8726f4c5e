"""How a cluster run is set up, and what it has counted.

Must not know: the driver, where workers run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from apcbatch.cluster.seam import WorkerFacts
from apcbatch.cluster.unit import Key
from apcbatch.cluster.units import LEAST_GROUP_S
from apcbatch.engine.counts import Counts
from apcbatch.types import Request


@dataclass(frozen=True)
class ClusterSettings:
    """workers: how many. most_states: that lie between workers (WorkerFacts.state_bytes bounds their bytes on a node).
    worker_timeout_s: a worker that says nothing for so long while it has work is given up; start_timeout_s: one that is
    not ready after so long. most_replaced: workers that are asked for in a row without one becoming ready.
    ahead_requests, ahead_tokens: what is read ahead. idle_s: see Staffing. least_unit_s: shorter units only where the
    work is short. send_slack_s: a state is computed again rather than sent only if that saves so many seconds, for then
    the request's record says that it was computed."""

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
    """What the driver leaves to whoever makes it. to_wire: a request as it travels. can_run: whether a worker would
    take it. held: the prefix keys whose snapshot every worker finds in its store. conversation_of: what the requests of
    one conversation have in common, where they have no plan. say: gets a line when a worker comes or goes."""

    to_wire: Callable[[Request], Any]
    can_run: Callable[[Request, WorkerFacts], bool] = lambda request, facts: True
    held: Callable[[Collection[Key]], set[Key]] = lambda keys: set()
    conversation_of: Callable[[Request], Hashable] = lambda request: None
    say: Callable[[str], None] = lambda line: None


@dataclass
class ClusterCounters(Counts):
    """The sums of what the workers' engines have counted, under the names of the engine's own counters; peaks are the
    highest of any worker. The others are the driver's: distinct tokens that were computed; units handed out; states
    that travelled, were dropped for lack of room, were lost with their node; imports that a worker could not have;
    requests that were given to a second worker; messages that came twice or too late; and what each worker has done
    (see Tally)."""

    units: int = 0
    states_sent: int = 0
    states_dropped: int = 0
    states_lost: int = 0
    imports_missed: int = 0
    requests_again: int = 0
    messages_ignored: int = 0
    workers_lost: int = 0
    workers: list[dict[str, Any]] = field(default_factory=list)

    def add(self, counted: Mapping[str, float]) -> None:
        """Add what a unit has counted."""
        for name, value in counted.items():
            if name.startswith("peak_") and name in _NUMBERS:
                setattr(self, name, max(getattr(self, name), int(value)))
            elif name in _NUMBERS:
                setattr(self, name, getattr(self, name) + int(value))
            elif name.removesuffix("_s") in self.seconds:
                self.seconds[name.removesuffix("_s")] += value


_OWN = {"workers", "seconds", "prefill_tokens", "decode_tokens", "unique_tokens"}
_NUMBERS = {one.name for one in fields(ClusterCounters)} - _OWN
