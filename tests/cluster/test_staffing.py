"""Workers come and go with the work: nobody idles for long, nobody is asked for in vain, and nothing is lost by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.settings import ClusterSettings, Hooks
from apcbatch.types import Request
from tests.cluster.runs import Planned, audit, check_answers, check_plan, planned, repeated, run
from tests.cluster.simulator import SimSeam, Speeds, Trouble
from tests.plan.plan_oracle import dataset, numbers, random_dataset

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
    assert outcome.seam.last_answer_s > 100
    assert sorted(map(str, endings(outcome))) == ["None", "let_go", "let_go", "let_go"]
    assert outcome.engine.counters.workers_lost == 0
    assert sum("is let go" in line for line in lines) == 3


def test_nobody_leaves_before_it_is_idle_for_long(tau: Planned) -> None:
    """Catches workers that go although there is work, or in a pause that is shorter than the bound."""
    outcome = run(tau.requests, 8, Speeds(prefill_tokens_per_s=100.0))
    check_plan(outcome, tau.requests)
    assert outcome.seam.last_answer_s > 60 and endings(outcome) == [None] * 8
    outcome = run(one_long_and_many_short().requests, 4, Speeds(decode_tokens_per_s=10.0), idle_s=1e6)
    assert endings(outcome) == [None] * 4


def test_workers_that_are_not_there_yet_are_not_waited_for() -> None:
    """Catches places that stay asked for, and machines that an autoscaler starts, although three requests are all."""
    chosen = planned(dataset(*(numbers(300, seed) for seed in range(3))), block_size=10, max_tokens=8)
    chosen.requests = [replace(request, max_tokens=LONG) for request in chosen.requests]
    outcome = run(chosen.requests, 64, Speeds(decode_tokens_per_s=10.0, next_start_s=100.0))
    check_answers(outcome, chosen.requests)
    assert len(outcome.engine._crew) <= 3


def streamed(engine: ClusterEngine, requests: list[Request], seconds: float = 0.0) -> list:
    """Submit requests and go on for so many seconds, or until all are answered."""
    for request in requests:
        engine.submit(request)
    results, end = [], engine._seam.clock() + seconds
    while engine.num_unfinished and (not seconds or engine._seam.clock() < end):
        results += engine.step()
    return results


@pytest.mark.parametrize("kills", [(), ((400.0, True), (460.0, False))])
def test_workers_come_again_with_the_work(kills: tuple) -> None:
    """Catches a run that stays small when more is to do than those that are left can do soon, or that has more
    workers than it was given."""
    few, many = one_long_and_many_short(), planned(repeated(random_dataset(3), 80), block_size=4)
    seam = SimSeam(Speeds(prefill_tokens_per_s=10.0, decode_tokens_per_s=10.0, start_s=5.0), Trouble(kills))
    settings = ClusterSettings(6)
    engine = ClusterEngine(seam, settings, Hooks(to_wire=lambda request: request))
    seam.check = lambda: audit(engine, settings)
    long = [replace(few.requests[0], max_tokens=LONG)]
    results = streamed(engine, long, 200.0)
    assert len(engine._crew) == 1
    later = [replace(request, id=f"later {request.id}") for request in many.requests]
    results += streamed(engine, later, 100.0)
    assert 3 <= len(engine._crew) <= 6
    results += streamed(engine, [])
    assert sorted(result.id for result in results) == sorted(request.id for request in long + later)
    assert all(result.error is None for result in results)
    assert max(len(seam.workers), 6) <= 12 + 2 * len(kills)


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
    assert outcome.seam.computed_tokens == chosen.computed_tokens
    assert "let_go" in endings(outcome) and outcome.engine.counters.states_lost == 0
