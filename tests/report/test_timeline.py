"""Requests over time: which process a record belongs to, and how many ran and had failed when."""

from __future__ import annotations

import random
from typing import Any

from apcbatch.job.processes import End, Process
from apcbatch.report.requests import Requests
from apcbatch.report.timeline import COLUMNS, timelines
from tests.effort import tries
from tests.report.test_numbers import answered

Times = list[tuple[float | None, float]]


def process(begin: float, seconds: float | None, spent: dict[str, Any] | None = None) -> Process:
    """A process that took `seconds`, or was killed."""
    end = None if seconds is None else End(seconds, 0, {"seconds": spent})
    return Process("0", begin, "apcbatch", "in", [], "demo", "float32", "cpu", {}, None, end)


def requests_of(times: Times) -> Requests:
    """Requests with these begins and ends; None as begin: it failed."""
    requests = Requests()
    for begin_s, end_s in times:
        record = answered(begin_s=begin_s, end_s=end_s)
        if begin_s is None:
            record |= {"response": None, "error": {"code": "internal", "message": "x", "retryable": False}}
        assert requests.add(record)
    return requests


def test_each_column_is_as_counted_request_by_request() -> None:
    """Fault: a request that runs on through a column is missing there, one that follows another counts beside it, or a
    failed one counts as running."""
    for _ in range(tries(50)):
        times: Times = []
        for _ in range(random.randint(1, 30)):
            begin = random.randrange(1000)  # in 10 ms; no time is at the edge of a column
            times.append((begin / 100 + 0.003, (begin + random.randrange(1, 400)) / 100 + 0.003))
        times += [(None, random.randrange(1, 1000) / 100) for _ in range(random.randint(0, 5))]
        [found] = timelines(requests_of(times), [process(7.0, 20.0)], 7.0)
        assert found["seconds"] == 20.0 and found["phases"] is not None
        width = 20.0 / COLUMNS
        marks = [begin for begin, _ in times if begin is not None]
        for column in range(COLUMNS):
            first, last = column * width, (column + 1) * width
            moments = [first, *(mark for mark in marks if first <= mark < last)]
            most = max(sum(b is not None and b <= at < e for b, e in times) for at in moments)
            assert found["running"][column] == most, (times, column)
        assert found["failed"][-1] == sum(begin is None for begin, _ in times)
        assert found["failed"] == sorted(found["failed"])


def test_each_process_has_its_own_requests() -> None:
    """Fault: a killed process has the requests of the one that resumed it, or lasts until that ends."""
    times = [(0.0, 1.0), (0.5, 2.0), (None, 2.5), (100.5, 101.0), (100.5, 104.0), (None, 100.25), (None, 103.0)]
    spent = {"load": 1.0, "prefill": 2.0, "total": 10.0}
    killed, resumed = timelines(requests_of(times), [process(50.0, None), process(150.0, 8.0, spent)], 50.0)
    assert (killed["begin"], killed["seconds"], killed["phases"]) == (50.0, 2.5, None)
    assert (resumed["begin"], resumed["seconds"]) == (150.0, 8.0)
    assert resumed["phases"] == {"load": 1.0, "plan": 0.0, "prefill": 2.0, "decode": 0.0, "store": 0.0, "idle": 7.0}
    assert (max(killed["running"]), killed["failed"][-1]) == (2, 1)
    assert (max(resumed["running"]), resumed["failed"][-1]) == (2, 2)
    assert resumed["running"][0] == 0 and resumed["running"][-1] == 0
    dropped = timelines(requests_of(times), [process(150.0, 8.0, spent)], 50.0)
    assert dropped == [resumed], "what an entry that is no longer there did belongs to none"


def test_shards_that_were_merged_are_one_timeline() -> None:
    """Fault: all requests of processes side by side belong to the one that began last; or a resumed one, which begins
    later, is drawn with them."""
    times = [(0.5, 2.0), (1.5, 3.0), (1.5, 9.0), (21.0, 22.0)]
    shards = [process(50.0, 8.0, {"total": 8.0}), process(51.0, 9.0, {"prefill": 2.0, "total": 9.0})]
    first, second = timelines(requests_of(times), [*shards, process(70.0, 3.0)], 50.0)
    assert (first["begin"], first["seconds"], second["begin"], second["seconds"]) == (50.0, 10.0, 70.0, 3.0)
    assert (max(first["running"]), max(second["running"])) == (3, 1)
    assert first["phases"]["idle"] == 15.0


def test_times_that_cannot_be_are_left_out() -> None:
    """Fault: a record of an earlier version, or one that somebody edited, is refused or drawn at a time that nobody
    noted."""
    requests = Requests()
    for own in [{}, {"begin_s": "1", "end_s": -1}, {"begin_s": True, "end_s": 1e300}, {"begin_s": None, "end_s": None}]:
        assert requests.add(answered(**own))
    [found] = timelines(requests, [process(7.0, 3.0)], 7.0)
    assert found["running"] == found["failed"] == [0] * COLUMNS
    assert timelines(requests, [], 0.0) == []
