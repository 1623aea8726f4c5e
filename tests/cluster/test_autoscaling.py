"""Workers come and go with the work: nobody idles for long, nobody is asked for in vain, and nothing is lost by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.plan_view import Assignment
from apcbatch.cluster.runtime import ClusterSettings, Hooks, WorkerFacts
from apcbatch.cluster.scheduler import GroupScheduler, SubmitBuffer, UnplannedQueue
from apcbatch.cluster.tasks import Group, Item
from apcbatch.cluster.workers import Autoscaler, Worker, WorkerCounts, WorkerTable
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Request, RequestPlan
from tests.cluster.runs import Planned, SeenEngine, audit, check_answers, check_plan, num_lost, planned, repeated, run
from tests.cluster.simulator import SimRuntime, Speeds, Trouble
from tests.plan.plan_oracle import dataset, numbers, random_dataset

FACTS = WorkerFacts("f", b"k", "node", "cpu", "float32", 1, Footprint(1), None, 1 << 30, 1 << 30)
LONG = 20_000  # tokens of an answer that takes some minutes


def endings(outcome) -> list[str | None]:
    return [one["ending"] for one in outcome.engine.counters.workers]


def one_long_and_many_short() -> Planned:
    """The first request has the longest answer by far."""
    chosen = planned(dataset(*(numbers(300, seed) for seed in range(30))), block_size=10, max_tokens=8)
    chosen.requests[0] = replace(chosen.requests[0], max_tokens=LONG)
    return chosen


def test_workers_leave_while_the_last_one_works() -> None:
    """Catches workers that idle until the run ends, ones that count as lost, and a last one that goes too."""
    chosen, lines = one_long_and_many_short(), list[str]()
    hooks = Hooks(to_wire=lambda request: request, say=lines.append)
    slow = Speeds(decode_tokens_per_s=10.0)
    outcome = run(chosen.requests, 4, slow, hooks=hooks, worker_timeout_s=20.0)
    check_answers(outcome, chosen.requests)
    check_plan(outcome, chosen.requests)
    assert outcome.runtime.last_answer_s > 100
    assert sorted(map(str, endings(outcome))) == ["None", "let_go", "let_go", "let_go"]
    assert num_lost(outcome.engine) == 0
    assert sum("is let go" in line for line in lines) == 3


def test_nobody_leaves_before_it_is_idle_for_long(tau: Planned) -> None:
    """Catches workers that go although there is work, or in a pause that is shorter than the bound."""
    outcome = run(tau.requests, 8, Speeds(prefill_tokens_per_s=100.0))
    check_plan(outcome, tau.requests)
    assert outcome.runtime.last_answer_s > 60 and endings(outcome) == [None] * 8
    outcome = run(one_long_and_many_short().requests, 4, Speeds(decode_tokens_per_s=10.0), idle_s=1e6)
    assert endings(outcome) == [None] * 4


def test_workers_that_are_not_there_yet_are_not_waited_for() -> None:
    """Catches places that stay asked for, and machines that an autoscaler starts, although three requests are all."""
    chosen = planned(dataset(*(numbers(300, seed) for seed in range(3))), block_size=10, max_tokens=8)
    chosen.requests = [replace(request, max_tokens=LONG) for request in chosen.requests]
    outcome = run(chosen.requests, 64, Speeds(decode_tokens_per_s=10.0, next_start_s=100.0))
    check_answers(outcome, chosen.requests)
    assert len(outcome.engine.workers) <= 3


def streamed(engine: ClusterEngine, clock: Callable[[], float], requests: list[Request], seconds: float = 0.0) -> list:
    """Submit requests and go on for so many seconds, or until all are answered."""
    for request in requests:
        engine.submit(request)
    results, end = [], clock() + seconds
    while engine.num_unfinished and (not seconds or clock() < end):
        results += engine.step()
    return results


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kills", [(), ((400.0, True), (460.0, False))])
def test_workers_come_again_with_the_work(kills: tuple) -> None:
    """Catches a run that stays small when more is to do than those that are left can do soon, or that has more
    workers than it was given."""
    few, many = one_long_and_many_short(), planned(repeated(random_dataset(3), 80), block_size=4)
    runtime = SimRuntime(Speeds(prefill_tokens_per_s=10.0, decode_tokens_per_s=10.0, start_s=5.0), Trouble(kills))
    settings = ClusterSettings(6)
    engine = SeenEngine(runtime, settings)
    runtime.check = lambda: audit(engine, settings)
    long = [replace(few.requests[0], max_tokens=LONG)]
    results = streamed(engine, runtime.clock, long, 200.0)
    assert len(engine.workers) == 1
    later = [replace(request, id=f"later {request.id}") for request in many.requests]
    results += streamed(engine, runtime.clock, later, 100.0)
    assert 3 <= len(engine.workers) <= 6
    results += streamed(engine, runtime.clock, [])
    assert sorted(result.id for result in results) == sorted(request.id for request in long + later)
    assert all(result.error is None for result in results)
    assert max(len(runtime.workers), 6) <= 12 + 2 * len(kills)


class Fleet:
    """An autoscaler (idle_s: 20) of four workers, of which the first two are ready, since 10 s and since 5 s."""

    def __init__(self) -> None:
        self.now, self.lines, self.killed = 0.0, list[str](), list[int]()
        numbers = count(1)
        runtime: Any = SimpleNamespace(clock=lambda: self.now, spawn=lambda: next(numbers), kill=self.killed.append)
        self.table, self.scheduler = WorkerTable(runtime, 4, 9, self.lines.append), GroupScheduler()
        self.unplanned = UnplannedQueue(lambda request: None)
        self.scaler = Autoscaler(self.table, self.scheduler, self.unplanned, 20.0)
        self.scale(0.0)
        for number, self.now in ((1, 10.0), (2, 5.0)):
            self.table.add_ready(next(one for one in self.table if one.id == number), FACTS)

    def scale(self, now: float) -> list[int]:
        """The workers that are let go at a time."""
        self.now = now
        return [worker.id for worker in self.scaler.scale(now)]

    def add_work(self, *seconds: float) -> None:
        for number, each in enumerate(seconds):
            self.scheduler.add(Group([Item(number, Request("r", [1]), seconds=each)]))


def test_who_is_let_go() -> None:
    """Catches a worker that goes before its time, a ready one that goes instead of one that is not, one that was idle
    for a shorter time, or the last one."""
    fleet = Fleet()
    assert fleet.scale(30.0) == [3, 4, 2] == fleet.killed and fleet.scale(1000.0) == []
    fleet = Fleet()
    assert fleet.scale(19.9) == [] and fleet.scale(20.0) == [3, 4]
    assert fleet.scale(24.9) == [] and fleet.scale(25.0) == [2] and fleet.scale(1000.0) == []
    fleet = Fleet()
    fleet.add_work(1.0, 1.0)
    assert fleet.scale(100.0) == [3, 4], "two units are left for two"


def test_idle_time_begins_with_the_first_look() -> None:
    """Fault: workers that were ready while the input was read and planned are let go before they got any work."""
    fleet = Fleet()
    fleet.scaler = Autoscaler(fleet.table, fleet.scheduler, fleet.unplanned, 20.0)
    assert [fleet.scale(now) for now in (1000.0, 1019.9, 1020.0)] == [[], [], [3, 4, 1]]


def test_a_group_that_waits_for_a_state_keeps_a_worker() -> None:
    """Fault: the worker that would get a waiting group is let go while another one makes its state."""
    fleet, buffer = Fleet(), SubmitBuffer(b"k")
    maker = buffer.add(Request("maker", [1] * 9, plan=RequestPlan(keep=(8,), reads=(1,))))
    reader = buffer.add(Request("reader", [1] * 12, plan=RequestPlan(resume_at=8)))
    for item in (maker, reader):
        fleet.scheduler.add(Group([item]))
    assert (len(fleet.scheduler.queue), len(fleet.scheduler.waiting)) == (1, 1)
    assert fleet.scale(100.0) == [3, 4], "two units are left for two"


def test_who_is_asked_for_again() -> None:
    """Catches a worker that is asked for with less to do than makes it worth while, or without a unit for it."""
    for seconds, workers in [
        ([10.0], 1),
        ([20.0], 1),
        ([20.0, 20.0], 2),
        ([20.0, 19.9], 1),
        ([60.0], 1),
        ([9.0] * 7, 3),
    ]:
        fleet = Fleet()
        assert fleet.scale(30.0) == [3, 4, 2]
        fleet.add_work(*seconds)
        assert fleet.scale(30.0) == [] and len(fleet.table) == workers
        assert sum("is asked for" in line for line in fleet.lines) == workers - 1


def test_requests_without_a_plan_ask_for_workers_by_the_unit() -> None:
    """Catches a worker for each request, where 32 go together, or none for the requests of a unit that is not full."""
    for requests, workers in [(1, 1), (32, 1), (33, 2), (64, 2), (65, 3)]:
        fleet = Fleet()
        assert fleet.scale(30.0) == [3, 4, 2]
        for number in range(requests):
            fleet.unplanned.add(Item(number, Request("r", [1])))
        assert fleet.scale(100.0) == [] and len(fleet.table) == workers


def test_who_is_silent_for_too_long() -> None:
    """Catches a worker that is ended at its bound, by the other bound, or though it has nothing to do."""
    fleet = Fleet()
    assert [list(fleet.table.silent(now, 5.0, 20.0)) for now in (20.0, 15.1)] == [[], []]
    assert [worker.id for worker, reason in fleet.table.silent(20.1, 5.0, 20.0)] == [3, 4]
    first = next(iter(fleet.table))
    fleet.now = 12.0
    group = Group([Item(0, Request("r", [1]))])
    fleet.table.begin(first, Assignment(1, group, {0: group.items[0]}, {}, {}, 1.0, 0))
    assert [list(fleet.table.silent(17.0, 5.0, 20.0))] == [[]]
    assert [worker.id for worker, reason in fleet.table.silent(17.1, 5.0, 20.0)] == [1]


def test_a_state_outlives_the_worker_that_is_let_go() -> None:
    """Catches a state that is computed again because its worker was let go, and a worker that stays for its states."""
    stem = numbers(600, 1)
    prompts = [stem + numbers(200, 2 + branch) for branch in range(12)]
    chosen = planned(dataset(*prompts), block_size=10, max_tokens=8)
    chosen.requests = [replace(one, max_tokens=4000) for one in chosen.requests]
    slow = Speeds(prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0)
    outcome = run(chosen.requests, 3, slow, idle_s=5.0)
    check_answers(outcome, chosen.requests)
    check_plan(outcome, chosen.requests)
    assert outcome.runtime.computed_tokens == chosen.computed_tokens
    assert "let_go" in endings(outcome) and outcome.engine.states.num_lost == 0


def assignment(num_requests: int, expected_s: float = 10.0, import_bytes: int = 0, is_alone: bool = False) -> Any:
    items = {number: Item(number, Request("r", [1])) for number in range(num_requests)}
    return Assignment(1, Group([*items.values()], is_alone=is_alone), items, {}, {}, expected_s, import_bytes)


def free_after(*assignments: Assignment, max_running: int = 2) -> float:
    """When a worker, with a pool of 1000 bytes, may get one more unit, after it got these at 100 s."""
    worker = Worker(1, 0.0, WorkerCounts(1), replace(FACTS, max_running=max_running, pool_bytes=1000))
    for one in assignments:
        worker.begin(one, 100.0)
    return worker.free


def test_when_a_worker_gets_one_more_unit() -> None:
    """Catches a worker that waits for its next unit, or holds more than it can begin while others have nothing."""
    for assignments, free in [
        ([assignment(9)], 100.0),
        ([assignment(10)], 109.0),
        ([assignment(10, 1.0)], 100.8),
        ([assignment(10, 4.0)], 103.6),
        ([assignment(5), assignment(4)], 100.0),
        ([assignment(5), assignment(5)], float("inf")),
        ([assignment(1, import_bytes=499)], 100.0),
        ([assignment(1, import_bytes=500)], 109.0),
        ([assignment(1, import_bytes=250), assignment(1, import_bytes=250)], float("inf")),
        ([assignment(1, is_alone=True)], float("inf")),
        ([assignment(0)] * 15, 100.0),
        ([assignment(0)] * 16, float("inf")),
    ]:
        assert free_after(*assignments) == pytest.approx(free)


def test_a_worker_that_has_room_again_gets_the_next_unit() -> None:
    """Catches a worker whose batch has emptied and that is asked for nothing until its unit ends."""
    fleet = Fleet()
    first, one = next(iter(fleet.table)), assignment(10, 100.0)
    first.facts = replace(FACTS, max_running=2, pool_bytes=1000)
    fleet.table.begin(first, one)
    assert [worker.id for worker in fleet.table.free_workers()] == [2]
    assert fleet.table.answered(first, one) and not fleet.table.answered(first, one)
    assert [worker.id for worker in fleet.table.free_workers()] == [2, 1]
    second = fleet.table.get(2)
    assert second is not None
    for worker, requests in ((second, 10), (first, 1)):
        worker.facts = replace(FACTS, max_running=4, pool_bytes=1000)
        fleet.table.begin(worker, assignment(requests))
    assert [worker.id for worker in fleet.table.free_workers()] == [1, 2], "of 10 and 9 requests"


def test_a_unit_that_ends_makes_the_next_one_the_first() -> None:
    """Catches an end that is expected by the time at which a unit was sent, not begun."""
    worker = Worker(1, 0.0, WorkerCounts(1), replace(FACTS, max_running=1))
    first, second = assignment(5), assignment(6)
    worker.begin(first, 100.0)
    worker.begin(second, 101.0)
    worker.end(first, 120.0)
    assert (second.begun, worker.free, worker.heard) == (120.0, 129.0, 101.0)
    worker.answered(second, 125.0)
    worker.answered(second, 126.0)
    assert (worker.load, worker.free) == (4, 126.0)


def test_a_lost_worker_that_was_not_replaced_may_come_again() -> None:
    """Catches a run that stays smaller although the machines start workers again."""
    numbers, lines = count(1), list[str]()
    runtime: Any = SimpleNamespace(clock=lambda: 0.0, spawn=lambda: next(numbers), kill=lambda worker: None)
    table = WorkerTable(runtime, 2, 1, lines.append)
    for worker in list(table):
        table.lose(worker, "it went")
    assert [worker.id for worker in table] == [3]
    table.refill(9)
    assert len(table) == 1, "one was asked for in a row already, and none was ready"
    table.add_ready(next(iter(table)), FACTS)
    table.refill(9)
    assert [worker.id for worker in table] == [3, 4]
    for worker in list(table):
        table.lose(worker, "it went")
    table.refill(9)
    assert not len(table), "one was asked for since the last one was ready"
