"""The loop around an engine: submit requests while it wants more, step, hand the results on.

`Engine.run`, `apcbatch run` and `tune-block-size --verify` share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from apcbatch.types import Request, Result

LOOK_AHEAD = 4  # times max_running: waiting requests that the scheduler chooses from


class Steppable(Protocol):
    """What the loop needs of an engine; see Engine."""

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and not yet handed back."""

    @property
    def wants_more(self) -> bool:
        """Whether it should be given another request before its next step."""

    def submit(self, request: Request) -> None:
        """Queue a request."""

    def step(self) -> list[Result]:
        """Run one pass and return the requests that ended with it."""


def serve(
    engine: Steppable, take: Callable[[], Request | None], stopped: Callable[[], bool] = lambda: False
) -> Iterator[list[Result]]:
    """Yield the results of each step until nothing is left.

    take: the next request, or None if there is none at the moment. It is asked again after each step: what the caller
    does with the results, such as submitting what follows from them, comes in between. stopped: whether to end before
    the next step, whatever is unfinished.
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
