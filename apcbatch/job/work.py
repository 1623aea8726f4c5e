"""Types that the loop of a run works with: requests and failures, their source, the engine.

Source and engine are protocols, so that tests can replace them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from apcbatch.data.chat.rollout import Rollout
from apcbatch.data.conversation import Conversation
from apcbatch.data.output.parser import OutputParser
from apcbatch.engine.serving import Steppable
from apcbatch.errors import RequestError
from apcbatch.job.record import Ticket
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Request, Result

if TYPE_CHECKING:
    from apcbatch.cluster.runtime import ClusterCounters
    from apcbatch.engine.counters import Counters


class JobEngine(Steppable, Protocol):
    """Engine interface that `run`, `LLM` and tune-block-size use. reading_tokens: number of tokens that prefill
    computes in the time of reading a snapshot of the store; None if it was not asked
    for (by --min-gain-tokens auto) or cannot be measured."""

    dtype: str
    device: str
    fingerprint: str
    key_fingerprint: bytes
    footprint: Footprint
    context_length: int | None
    vocab_size: int
    reading_tokens: int | None

    @property
    def counters(self) -> Counters | ClusterCounters:
        """Tokens, seconds and bytes of the engine so far."""

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Answer requests, pulled one by one; yield each result when it is finished."""

    def can_run(self, request: Request) -> bool:
        """Return whether `submit` would accept a request."""

    def held(self, keys: Collection[bytes]) -> set[bytes]:
        """Return the prefix keys whose snapshot is in the store, or kept in memory for it."""

    def add_readers(self, key: bytes, count: int) -> None:
        """Count more pending readers of a snapshot, held or still to be published; -1: drop one. A reader is a planned
        request that is submitted later."""

    def learn_answer(self, token_ids: list[int]) -> None:
        """Add an answer of an earlier run to the draft index."""

    def drop_waiting(self) -> None:
        """Drop the requests that have not begun."""

    def abort(self) -> None:
        """Drop every unfinished request."""

    def flush(self) -> None:
        """Wait until all snapshots to be stored are on disk."""

    def close(self) -> None:
        """Close the store."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Request that failed before it reached the engine, or live episode that failed."""

    ticket: Ticket
    error: RequestError


@dataclass(slots=True)
class OpenRollout:
    """Rollout in progress. remaining: tickets of its turns that are still to be submitted; each turn needs the answer
    to the previous one."""

    conversation: Conversation
    rollout: Rollout
    remaining: deque[Ticket]


@dataclass(frozen=True, slots=True)
class Tag:
    """Data that the job attaches to a request, and gets back with its result. rollout: None if the prompt contains the
    recorded answers, not generated ones; a live episode is job/live.py's. ended: monotonic time at which the answer was
    there, if its record is made later."""

    ticket: Ticket
    rollout: Any
    output_parser: OutputParser = OutputParser()
    ended: float | None = None


Work = Request | Failure


class WorkSource(Protocol):
    """Source of the requests and failures of one run."""

    plan_s: float  # seconds spent on planning so far
    beyond_window_tokens: int  # tokens that a larger planning window would have restored

    @property
    def exhausted(self) -> bool:
        """Whether the input is read to its end and all work is handed out."""

    @property
    def num_open_rollouts(self) -> int:
        """Number of rollouts that have begun and are not finished."""

    @property
    def total(self) -> int | None:
        """Requests to answer in this run; None until the whole input is read."""

    def opening(self) -> str:
        """Return the opening line of a run: the numbers of conversations and requests read so far, and which turns are
        requests."""

    def pause(self) -> bool:
        """Return whether the engine should run its requests before more input is read: True once at the end of each
        planning window."""

    def next(self) -> Work | None:
        """Return the next request or failure; None if there is none at the moment (see exhausted)."""

    def follow_up(self, result: Result) -> list[Work]:
        """Return the work that depends on a result, such as the next turn of a rollout."""


def requests_of(source: WorkSource) -> Iterator[Request]:
    """Yield the requests of a source, without its failures."""
    while not source.exhausted:
        work = source.next()
        if isinstance(work, Request):
            yield work
