"""The pieces of work that an input falls into, and the face of what hands them out.

Must not know: how prompts are made, engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from apcbatch.data.reading import Reading
from apcbatch.data.records import Conversation
from apcbatch.data.rollout import Rollout
from apcbatch.errors import RequestError
from apcbatch.job.record import Ticket
from apcbatch.types import Request, Result


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
    """What the feeder attaches to a request and needs back with its result. rollout: None for a recorded turn. reading:
    how the answer is read."""

    ticket: Ticket
    rollout: OpenRollout | None
    reading: Reading = Reading()


Work = Request | Failure


class WorkSource(Protocol):
    """Hands out the work of one run, piece by piece."""

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

    def follow(self, result: Result) -> list[Work]:
        """The work that a result makes possible."""


def requests_of(source: WorkSource) -> Iterator[Request]:
    """The requests that a source hands out, without the failures."""
    while not source.exhausted:
        work = source.next()
        if isinstance(work, Request):
            yield work
