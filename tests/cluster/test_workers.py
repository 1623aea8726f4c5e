"""Which workers there are, which of them may get more, and which say nothing for too long."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.cluster.plan_view import Assignment
from apcbatch.cluster.runtime import MOST_UNITS, WorkerFacts
from apcbatch.cluster.tasks import Group, Item, Rates
from apcbatch.cluster.workers import MOST_REPLACED, Worker, WorkerCounts, WorkerTable
from apcbatch.errors import RequestError
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Request, Result

FACTS = WorkerFacts("f", b"k", "node", "cpu", "float32", 1, Footprint(1), None, 1 << 30, 1 << 30, 0, 4 << 30)


class Fleet:
    """A table of workers over a clock that a test sets."""

    def __init__(self, number: int) -> None:
        self.now, numbers = 0.0, count(1)
        runtime: Any = SimpleNamespace(clock=lambda: self.now, spawn=lambda: next(numbers), kill=lambda worker: None)
        self.table = WorkerTable(runtime, number, lambda line: None)

    def ready(self, number: int, **facts: Any) -> Worker:
        worker = self.table.get(number)
        assert worker is not None
        self.table.add_ready(worker, replace(FACTS, **facts))
        return worker


def assignment(num_requests: int, import_bytes: int = 0, is_alone: bool = False) -> Assignment:
    items = {number: Item(number, Request("r", [1])) for number in range(num_requests)}
    return Assignment(1, Group([*items.values()], is_alone=is_alone), items, {}, {}, import_bytes)


def test_when_a_worker_gets_one_more_unit() -> None:
    """Fault: a worker waits for its next unit, or holds more than it can begin while others have nothing. (max_running
    is 2, so that it is to have ten requests, and its pool has 1000 bytes.)"""
    for assignments, has_room in [
        ([], True),
        ([assignment(9)], True),
        ([assignment(10)], False),
        ([assignment(5), assignment(4)], True),
        ([assignment(5), assignment(5)], False),
        ([assignment(1, import_bytes=499)], True),
        ([assignment(1, import_bytes=500)], False),
        ([assignment(1, import_bytes=250), assignment(1, import_bytes=250)], False),
        ([assignment(1, is_alone=True)], False),
        ([assignment(0)] * (MOST_UNITS - 1), True),
        ([assignment(0)] * MOST_UNITS, False),
    ]:
        worker = Worker(1, 0.0, WorkerCounts(1), replace(FACTS, max_running=2, pool_bytes=1000), 0.0, assignments)
        assert worker.has_room == has_room


def test_a_worker_that_has_room_again_gets_the_next_unit() -> None:
    """Fault: a worker whose batch has emptied gets nothing until its unit ends; or the one with more to do is first."""
    fleet = Fleet(3)
    first, second = (fleet.ready(number, max_running=2) for number in (1, 2))
    units = [assignment(5), assignment(5)]
    for one in units:
        fleet.table.begin(first, one)
    assert fleet.table.free() == [second], "the third is not ready"
    fleet.table.answered(first, units[0])
    assert fleet.table.free() == [second, first]
    for one in (units[1], units[1]):
        fleet.table.answered(first, one)
    fleet.table.begin(second, assignment(8))
    assert fleet.table.free() == [first, second], "of 7 and 8 requests"
    fleet.table.end(first, units[0])
    assert (first.load, first.assignments) == (3, [units[1]])
    fleet.table.lose(first, "it went")
    assert fleet.table.free() == [second]


def test_who_is_silent_for_too_long() -> None:
    """Fault: a worker is ended at its bound, by the other bound, or though it has nothing to do."""
    fleet = Fleet(4)
    for number in (1, 2):
        first = fleet.ready(3 - number)
    assert [list(fleet.table.silent(now, 5.0, 20.0)) for now in (20.0, 15.1)] == [[], []]
    assert [worker.id for worker, reason in fleet.table.silent(20.1, 5.0, 20.0)] == [3, 4]
    fleet.now = 12.0
    fleet.table.begin(first, assignment(1))
    assert not list(fleet.table.silent(17.0, 5.0, 20.0))
    assert [worker.id for worker, reason in fleet.table.silent(17.1, 5.0, 20.0)] == [1]


def test_a_lost_worker_is_replaced_unless_none_starts() -> None:
    """Fault: workers that cannot start are asked for without end, or a run that lost many shrinks."""
    fleet = Fleet(1)
    for number in range(1, MOST_REPLACED + 2):
        assert [worker.id for worker in fleet.table] == [number]
        if number == 3:
            fleet.ready(number)
        fleet.table.lose(next(iter(fleet.table)), "it went")
    assert [worker.id for worker in fleet.table] == [MOST_REPLACED + 2], "the third became ready"
    for _ in range(2):
        assert len(fleet.table) == 1
        fleet.table.lose(next(iter(fleet.table)), "it went")
    assert not len(fleet.table) and fleet.table.last_reason == "it went"


def test_the_rates_are_those_of_the_answers() -> None:
    """Fault: a prior that the first few tokens overrule, or that stays; requests that are taken for as long as they may
    be, where answers end early."""
    item, rates = Item(0, Request("r", [1] * 1000, max_tokens=100)), Rates()
    rates.estimate([item])
    assert item.seconds == item.critical_path_s == pytest.approx(1.0 + 0.5)
    rates.add(item, Result("r", 10, computed_tokens=10, prefill_ms=0.1, decode_ms=100.0))
    rates.estimate([item])
    assert item.seconds == pytest.approx(1000 * 0.2561 / 266 + 100 * 1.38 / 356)
    for _ in range(1000):
        rates.add(item, Result("r", 1000, [1] * 25, computed_tokens=1000, prefill_ms=2000.0, decode_ms=100.0))
    rates.estimate([item])
    assert item.seconds == pytest.approx(2.0 + 0.1, rel=0.01)


def test_a_tally_adds_up() -> None:
    """Fault: a sum that is taken from another number, a first token that is counted as decoded, errors as work."""
    counts = WorkerCounts(3, "host", "cpu")
    assert counts.summary()["tokens_per_s"] is None
    some = {"cached_tokens": 6, "computed_tokens": 4, "prefill_ms": 250.0, "decode_ms": 750.0}
    other = Result("other", 10, [1, 2], **some)
    counts.add(Result("one", 10, [1, 2, 3], **some, others=[other]))
    counts.add(Result("two", 10, [], **some))
    counts.add(Result("three", 10, error=RequestError("invalid_request", "no")))
    assert counts.summary() == {
        "id": 3, "node": "host", "device": "cpu", "units": 0, "requests": 3, "prefill_tokens": 8, "decode_tokens": 3,
        "cached_tokens": 12, "busy_s": 2.0,
        "states_received": 0, "states_missing": 0, "requests_unfinished": 0, "tokens_per_s": 5.5, "ending": None,
    }  # fmt: skip
