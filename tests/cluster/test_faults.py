"""Workers, nodes and the driver die at any moment; messages come late and twice; nothing is lost, doubled or
different."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from apcbatch.cluster.runtime import ClusterSettings
from apcbatch.cluster.states import StateTable
from apcbatch.errors import StoppedError
from tests.cluster.runs import Planned, SeenEngine, check_answers, first, num_lost, planned, run
from tests.cluster.simulator import SimRuntime, Speeds, Trouble
from tests.effort import seeds
from tests.plan.plan_oracle import Dataset, dataset, numbers, random_dataset


def seeded(seed: int) -> dict:
    """The arguments of a troubled run."""
    source = random.Random(seed)
    kills = tuple((source.uniform(0, 6), source.random() < 0.4) for _ in range(source.randint(1, 3)))
    return {
        "num_workers": source.choice((1, 2, 4, 8)),
        "speeds": Speeds(
            start_s=source.choice((0.0, 0.5, 3.0)), node_bytes=source.choice((60 << 20, 8 << 30, 8 << 30))
        ),
        "trouble": Trouble(kills, twice=source.choice((0, 0.1)), delay_s=source.choice((0, 0.05)), seed=seed),
        "per_node": source.choice((1, 2)),
    }


@pytest.mark.data
@pytest.mark.slow
def test_seeded_kills(tau_data: Dataset) -> None:
    """Catches a request that is lost, doubled or answered differently because a worker, a node or the driver died.
    After the driver's death the run goes on with what is not answered, planned anew, on another number of workers; so
    it does, as with --retry-errors, for a request that two kills happened to hit."""
    data = first(tau_data, 10)
    requests = planned(data).requests
    num_killed = 0
    for seed in seeds(200):
        left, answered, again = requests, set[str](), 0
        driver_dies = seed % 4 == 0
        stop_after = 1 + seed % (len(left) - 1) if driver_dies else None
        outcome = run(left, **seeded(seed), stop_after=stop_after)
        while True:
            got = {result.id for result in outcome.results}
            check_answers(outcome, [request for request in left if request.id in got])
            assert driver_dies or len(got) == len(left), "results are lost"
            num_killed += outcome.runtime.num_killed + driver_dies
            answered |= {result.id for result in outcome.results if result.error is None}
            left = planned(data, skip=frozenset(map(int, answered))).requests
            if not left:
                break
            again += 1
            outcome, driver_dies = run(left, **seeded(seed + again)), False
        assert len(answered) == len(requests)
    assert num_killed, "nothing was killed"


def test_kills_on_any_forest() -> None:
    """Catches the same on small trees of every shape, with several states of one request and readers at every depth."""
    slow = Speeds(prefill_tokens_per_s=10, decode_tokens_per_s=100, start_s=0.5, node_death_s=0.3)
    for seed in seeds(400):
        speeds = replace(slow, node_bytes=(1 + seed % 9) * slow.state_bytes)
        chosen = planned(random_dataset(seed), block_size=1 + seed % 3)
        source = random.Random(seed)
        kills = tuple((source.uniform(0, 8), source.random() < 0.7) for _ in range(3))
        trouble = Trouble(kills, twice=0.2, delay_s=0.2, seed=seed)
        outcome = run(chosen.requests, 1 + seed % 5, speeds, trouble, least_unit_s=0.1)
        check_answers(outcome, chosen.requests)


def test_states_outlive_their_worker(tau: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches states that are thrown away and computed again because the process that made them ended: they lie with
    the node; and states of a lost node that are waited for."""
    for seed in seeds(20):
        with monkeypatch.context() as patch:
            patch.setattr(StateTable, "forget_node", lambda states, node: pytest.fail("no node was lost"))
            begin = random.Random(seed).uniform(2, 4.5)
            outcome = run(tau.requests, 4, trouble=Trouble(((begin, False), (begin + 2, False)), seed=seed))
        check_answers(outcome, tau.requests)
        assert num_lost(outcome.engine) == 2
        assert not any(one["states_missing"] for one in outcome.engine.counters.workers)
        outcome = run(tau.requests, 4, trouble=Trouble(((4.0, True),), seed=seed))
        check_answers(outcome, tau.requests)


def lost_stem(end: Callable[[SimRuntime, str], None]) -> tuple[int, int]:
    """(tokens computed again, states that were missing) of 32 requests on eight workers, where `end` befalls the node
    that holds their stem of 6000 tokens."""
    stem = numbers(6000, 1)
    chosen = planned(dataset(*(stem + numbers(200, 2 + branch) for branch in range(32))), block_size=10)
    runtime = SimRuntime(Speeds(prefill_tokens_per_s=1000, node_death_s=0.0))
    engine = SeenEngine(runtime, ClusterSettings(8))
    for request in chosen.requests:
        engine.submit(request)
    results = engine.step()
    while not len(engine.states):
        results += engine.step()
    end(runtime, next(iter(engine.states)).home)
    while engine.num_unfinished:
        results += engine.step()
    assert sorted(result.id for result in results) == sorted(request.id for request in chosen.requests)
    missing = sum(one["states_missing"] for one in engine.counters.workers)
    return runtime.computed_tokens - chosen.computed_tokens, missing


def test_a_node_goes_in_silence() -> None:
    """Catches a state that every reader asks for in vain, one after the other, because no worker was left on its node
    to be lost with it."""
    _, missing = lost_stem(lambda runtime, node: runtime.gone.add(node))
    assert 0 < missing <= 8


def test_a_lost_state_is_computed_once() -> None:
    """Fault: every reader of a stem that was lost with its machine computes it for itself."""
    again, missing = lost_stem(SimRuntime.end_node)
    assert 6000 <= again < 2 * 6000 and not missing


def test_a_request_that_ends_workers_ends_two(tau: Planned) -> None:
    """Catches a run that a poisonous request ends, one that ends more workers than it takes to know it, and innocent
    requests that are blamed with it."""
    for seed in seeds(40):
        source = random.Random(seed)
        ids = frozenset(request.id for request in source.sample(tau.requests, 1 + seed % 4))
        outcome = run(tau.requests, source.choice((1, 2, 4, 8)), trouble=Trouble(poison=ids))
        check_answers(outcome, tau.requests)
        errors = {result.id: result.error for result in outcome.results if result.error is not None}
        assert set(errors) == ids
        assert {id: outcome.runtime.deaths[id] for id in ids} == dict.fromkeys(ids, 2)
        assert num_lost(outcome.engine) <= 2 * len(ids)
        assert all(error.retryable and "2 workers ended" in error.message for error in errors.values())


def test_what_a_worker_was_at_is_not_known(tau: Planned) -> None:
    """Catches an innocent request that is given up where nobody can say what a worker was at when it ended."""
    ids = frozenset({tau.requests[0].id, tau.requests[100].id})
    outcome = run(tau.requests, 4, trouble=Trouble(poison=ids, is_blind=True))
    check_answers(outcome, tau.requests)
    assert {result.id for result in outcome.results if result.error is not None} == ids
    assert num_lost(outcome.engine) <= 4


def test_the_innocent_are_never_given_up(tau: Planned) -> None:
    """Catches a request that is an error record because it ran beside a poisonous one, or was lost with a machine."""
    for seed in seeds(60):
        source = random.Random(seed)
        ids = frozenset(request.id for request in source.sample(tau.requests, 2))
        kills = tuple((source.uniform(0, 6), True) for _ in range(6))
        trouble = Trouble(kills, poison=ids, twice=0.1, delay_s=0.05, seed=seed)
        outcome = run(tau.requests, 4, Speeds(start_s=0.5), trouble)
        check_answers(outcome, tau.requests)
        assert {result.id for result in outcome.results if result.error is not None} == ids


def test_a_request_that_hangs_is_found(tau: Planned) -> None:
    """Catches a hang that is noticed late or never, and one for which requests beside it are blamed."""
    ids = frozenset({tau.requests[50].id})
    outcome = run(tau.requests, 3, trouble=Trouble(hanging=ids), worker_timeout_s=20.0)
    check_answers(outcome, tau.requests)
    assert {result.id for result in outcome.results if result.error is not None} == ids
    assert num_lost(outcome.engine) == 2
    assert outcome.runtime.last_answer_s < 100


def test_a_silent_worker_is_given_up(tau: Planned) -> None:
    """Catches a run that waits forever for a worker that says nothing."""
    outcome = run(tau.requests, 3, trouble=Trouble(mute=frozenset({1})), worker_timeout_s=20.0)
    check_answers(outcome, tau.requests)
    assert num_lost(outcome.engine) == 1


def test_a_worker_that_takes_long_is_kept(tau: Planned) -> None:
    """Catches a worker that is given up because its requests take longer than the bound, although it says that it
    computes."""
    slow = Speeds(prefill_tokens_per_s=20.0, decode_tokens_per_s=0.2)
    outcome = run(tau.requests[:40], 2, slow, worker_timeout_s=20.0)
    check_answers(outcome, tau.requests[:40])
    assert num_lost(outcome.engine) == 0
    assert max(len(result.token_ids) for result in outcome.results) / slow.decode_tokens_per_s > 100


def test_nobody_left(tau: Planned) -> None:
    """Catches a hang when no worker is left and none can be had."""
    kills = ((1.0, False), (1.5, True))
    with pytest.raises(StoppedError, match="no worker is left: .* 240 unanswered requests"):
        run(tau.requests, 2, trouble=Trouble(kills, no_replacement=True))
    with pytest.raises(StoppedError, match="was not ready after 60 s; .* to continue with the first request"):
        run(tau.requests, 2, Speeds(start_s=1e6), start_timeout_s=60.0)


def test_fewer_workers_than_were_asked_for(tau: Planned) -> None:
    """Catches a run that stops although a worker is left."""
    outcome = run(tau.requests, 2, trouble=Trouble(((1.0, False),), no_replacement=True))
    check_answers(outcome, tau.requests)
