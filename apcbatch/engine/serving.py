"""Serving loop of an engine: submit requests while it wants more, step, yield the results.

`Engine.run`, `apcbatch run` and `tune-block-size --verify` share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from apcbatch.types import Request, Result

LOOK_AHEAD = 4  # waiting requests that the scheduler chooses from, in multiples of max_running


class Steppable(Protocol):
    """The part of an engine that the loop uses; see Engine."""

    @property
    def num_unfinished(self) -> int:
        """Number of submitted requests whose result was not returned yet."""

    @property
    def wants_more(self) -> bool:
        """Whether another request should be submitted before the next step."""

    def submit(self, request: Request) -> None:
        """Queue a request."""

    def step(self) -> list[Result]:
        """Run one pass and return the requests that ended with it."""


def serve(
    engine: Steppable, take: Callable[[], Request | None], stopped: Callable[[], bool] = lambda: False
) -> Iterator[list[Result]]:
    """Yield the results of each step until nothing is left.

    take: returns the next request, or None if there is none yet; called again after each step, when the caller has seen
    its results. stopped: returns whether to end before the next step, with requests unfinished.
    """
    while True:
        while engine.wants_more and (request := take()) is not None:
            engine.submit(request)
        if stopped() or not engine.num_unfinished:
            return
        yield engine.step()


def answered(engine: Steppable, requests: Iterable[Request]) -> Iterator[Result]:
    """Pull requests lazily and yield results as they finish, failures included."""
    source = iter(requests)
    for results in serve(engine, lambda: next(source, None)):
        yield from results
