"""The loop around an engine, on an engine that only counts."""

from __future__ import annotations

from apcbatch.engine.serving import serve
from apcbatch.types import Request, Result


class Counting:
    """Holds up to two requests in waiting and ends the oldest with each step. events: what was asked of it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.requests: list[Request] = []

    @property
    def num_unfinished(self) -> int:
        return len(self.requests)

    @property
    def wants_more(self) -> bool:
        return len(self.requests) < 2

    def submit(self, request: Request) -> None:
        self.events.append(f"submit {request.id}")
        self.requests.append(request)

    def step(self) -> list[Result]:
        self.events.append("step")
        return [Result(self.requests.pop(0).id, 1)]


def request(name: str) -> Request:
    return Request(name, [1])


def test_no_more_is_taken_than_the_engine_wants() -> None:
    """Fault: the whole input is pulled at once, a request is lost, the loop continues when nothing is left; a pause of
    the source ends the run, or its end does though a result has led to another request."""
    engine, source = Counting(), map(request, "abc")
    ended = [result.id for results in serve(engine, lambda: next(source, None)) for result in results]
    assert ended == ["a", "b", "c"]
    assert engine.events == ["submit a", "submit b", "step", "submit c", "step", "step"]
    offers = iter([request("a"), None, request("b"), None, None])
    assert [one.id for results in serve(Counting(), lambda: next(offers)) for one in results] == ["a", "b"]
    engine, source, ended = Counting(), map(request, "a"), []
    for results in serve(engine, lambda: next(source, None)):
        ended += [result.id for result in results]
        if ended == ["a"]:
            engine.submit(request("a again"))
    assert ended == ["a", "a again"]


def test_it_stops_before_the_next_step_and_asks_first() -> None:
    """Fault: a job that must end runs one more pass, or does not write the failures that come before its end."""
    engine, taken = Counting(), []

    def take() -> Request | None:
        taken.append(len(taken))
        return request("a") if len(taken) == 1 else None

    assert list(serve(engine, take, lambda: True)) == []
    assert engine.events == ["submit a"] and len(taken) == 2
    assert engine.num_unfinished == 1, "what is unfinished stays so"
