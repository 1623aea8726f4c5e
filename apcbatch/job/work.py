"""What the loop of a run works with: requests and failures, their source, the engine.

Must not know: torch; tests put other engines in place of the real ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from apcbatch.data.chat.rollout import Rollout
from apcbatch.data.input.records import Conversation
from apcbatch.data.output.parser import OutputParser
from apcbatch.engine.observer import Observer
from apcbatch.engine.serving import Steppable
from apcbatch.errors import RequestError
from apcbatch.job.record import Ticket
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Request, Result

if TYPE_CHECKING:
    from apcbatch.cluster.runtime import ClusterCounters
    from apcbatch.engine.counters import Counters


class JobEngine(Steppable, Protocol):
    """An engine as run, tune-block-size and bench use it."""

    dtype: str
    device: str
    fingerprint: str
    key_fingerprint: bytes
    footprint: Footprint
    context_length: int | None
    vocab_size: int

    @property
    def counters(self) -> Counters | ClusterCounters:
        """What it has done so far."""

    def observe(self, observer: Observer) -> None:
        """Tell an observer from now on what it does."""

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Answer requests, pulled one by one; results come as they finish."""

    def can_run(self, request: Request) -> bool:
        """Whether `submit` would take a request."""

    def held(self, keys: Collection[bytes]) -> set[bytes]:
        """Those of the prefix keys whose snapshot is in memory or in the store."""

    def drop_waiting(self) -> None:
        """Drop the requests that have not begun."""

    def abort(self) -> None:
        """Drop every request that is not finished."""

    def flush(self) -> None:
        """Wait until everything that was kept is on disk."""

    def close(self) -> None:
        """Close the store."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed before it reached the engine."""

    ticket: Ticket
    error: RequestError


@dataclass(slots=True)
class OpenRollout:
    """A conversation in rollout that has begun. remaining: its turns that are not answered yet, each built on the
    answer before it."""

    conversation: Conversation
    rollout: Rollout
    remaining: deque[Ticket]


@dataclass(frozen=True, slots=True)
class Tag:
    """What a request carries for its result. rollout: None for a recorded turn."""

    ticket: Ticket
    rollout: OpenRollout | None
    output_parser: OutputParser = OutputParser()


Work = Request | Failure


class WorkSource(Protocol):
    """Hands out the requests and failures of one run."""

    plan_s: float  # seconds spent on planning so far

    @property
    def exhausted(self) -> bool:
        """Whether the input has been read to its end and everything was handed out."""

    @property
    def num_open_rollouts(self) -> int:
        """Rollouts that have begun and are not finished."""

    @property
    def total(self) -> int | None:
        """Requests to be answered in this run; None until the whole input is read."""

    def pause(self) -> bool:
        """Whether the engine should begin with what it has before more is read. True once at a window's end."""

    def next(self) -> Work | None:
        """The next piece of work; None if there is none at the moment (see exhausted)."""

    def follow_up(self, result: Result) -> list[Work]:
        """The work that follows a result, such as the next turn of a rollout."""


def requests_of(source: WorkSource) -> Iterator[Request]:
    """The requests that a source hands out, without the failures."""
    while not source.exhausted:
        work = source.next()
        if isinstance(work, Request):
            yield work
