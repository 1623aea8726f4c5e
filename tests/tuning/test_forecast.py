"""The what-if tables against brute force."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from apcbatch.engine.coverage import CoverageTree
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Planner
from apcbatch.plan.tree_shape import ORDERS
from apcbatch.tuning.forecast import Forecast, Forecaster
from tests.effort import tries
from tests.plan.plan_oracle import Dataset, dataset, ideals, random_dataset, serve
from tests.tuning.forecasts import Seen, forecast

BLOCKS = [1, 2, 3, 5, 8, 64]
FOOTPRINT = Footprint(100, kv_token_bytes=3, page_tokens=4)


@pytest.fixture(params=range(tries(50)))
def data(request: pytest.FixtureRequest) -> Dataset:
    """A random forest whose conversations are lines, one after the other."""
    made = random_dataset(random.getrandbits(32))
    order = sorted(range(len(made.prompts)), key=made.conversations.__getitem__)
    prompts, conversations = ([them[index] for index in order] for them in (made.prompts, made.conversations))
    return Dataset(prompts, conversations, made.where)


def tables(data: Dataset, block_size: int = 8, **options: object) -> tuple[Forecast, Seen]:
    return forecast(data, BLOCKS, Planner(block_size, footprint=FOOTPRINT, **options))


@pytest.mark.parametrize("order", ORDERS)
def test_all_and_last_are_what_the_engine_does(data: Dataset, order: str) -> None:
    """Catches a table that is off by one token for one request, or counts a snapshot twice or not at all."""
    made, seen = tables(data, order=order)
    work = range(len(data.prompts))  # in any order: a run without a plan takes the file's
    ideal = sum(ideals(data, work).values())
    for block_size, grid in made.grids.items():
        for policy in ("all", "last"):
            expected, found = serve(data, work, block_size, policy), grid[policy]
            where = (data.where, block_size, policy)
            assert seen.resume_at(policy, block_size) == [expected.resume_at[i] for i in work], where
            assert found.snapshots_written == len(expected.owner), where
            assert found.snapshots_read == len(set(expected.read)), where
            assert found.written_bytes == sum(
                100 + 3 * (len(prefix) - _kept_above(prefix, set(expected.owner), policy, expected.resume_at[owner]))
                for prefix, owner in expected.owner.items()
            ), where
            assert found.floor_tokens == ideal - found.cached_tokens, where
            assert found.store_bytes == found.peak_live_bytes == found.written_bytes, where
            assert (found.peak_live_snapshots, found.snapshots_for_later) == (len(expected.owner), 0), where
            assert (found.policy, found.prompt_tokens) == (policy, sum(map(len, data.prompts))), where
            assert found.hit_rate == sum(expected.resume_at.values()) / found.prompt_tokens, where
            assert found.ideal_hit_rate == ideal / found.prompt_tokens, where
            assert found.computed_tokens == found.prompt_tokens - found.cached_tokens, where


def _kept_above(prefix: tuple[int, ...], kept: set[tuple[int, ...]], policy: str, resume_at: int) -> int:
    """Where the KV of a kept prefix begins: at what its owner went on from."""
    if policy == "last":
        return resume_at
    return max((end for end in range(len(prefix)) if prefix[:end] in kept), default=0)


@pytest.mark.parametrize("order", ORDERS)
def test_planned_is_the_plan(data: Dataset, order: str) -> None:
    """Catches a table that says something else than the plan that `run` then follows, limits included."""
    options = {"order": order, "capacity_bytes": 700, "min_gain_tokens": 3, "later_budget_bytes": 900}
    made, seen = tables(data, **options)
    for block_size, grid in made.grids.items():
        plan, found = Planner(block_size, footprint=FOOTPRINT, **options).plan(data.tree()), grid["planned"]
        where = (data.where, block_size)
        assert seen.resume_at("planned", 8) == [todo.resume_at for todo in plan.requests], where
        assert [served.index for served in seen.requests["planned", 8]] == plan.order, where
        for name in ("snapshots_written", "snapshots_read", "cached_tokens", "computed_tokens"):
            assert getattr(found, name) == getattr(plan, name), (*where, name)
        assert (found.peak_live_snapshots, found.peak_live_bytes) == (plan.peak_live_snapshots, plan.peak_live_bytes)
        assert (found.snapshots_for_later, found.store_bytes) == plan.for_later[block_size], where
        assert found.store_bytes <= 900, where
        assert found.written_bytes == sum(  # a state for each, and the KV of every token that is computed up to there
            100 * len(todo.keep) + 3 * (max(todo.keep, default=todo.resume_at) - todo.resume_at)
            for todo in plan.requests
        ), where
        assert found.floor_tokens == plan.ideal_tokens - plan.cached_tokens, where


def test_the_dataset_is_counted(data: Dataset) -> None:
    """Catches totals or an ideal that do not fit the requests."""
    made, seen = tables(data, order="file")
    covered = ideals(data, range(len(data.prompts)))
    assert [served.ideal for served in seen.of("planned", 8)] == [
        covered[index] for index in range(len(data.prompts))
    ], data.where
    assert (made.requests, made.prompt_tokens) == (len(data.prompts), sum(map(len, data.prompts)))
    assert made.unique_tokens == len({p[:end] for p in data.prompts for end in range(1, len(p) + 1)})
    assert made.ideal_hit_rate == sum(covered.values()) / made.prompt_tokens
    assert list(made.grids) == BLOCKS


def test_rewritten_history_is_counted(data: Dataset) -> None:
    """Catches prompts that drop their past being counted where they only grow, and the other way round."""
    made, _ = tables(data, order="file")
    covered = ideals(data, range(len(data.prompts)))
    lost, before = [], {}
    for index, (prompt, conversation) in enumerate(zip(data.prompts, data.conversations, strict=True)):
        past = before.get(conversation)
        before[conversation] = prompt
        if past is not None and prompt[: len(past)] != past:
            lost.append(max(0, min(len(past), len(prompt) - 1) - covered[index]))
    assert (made.rewritten_prompts, made.rewritten_tokens) == (len(lost), sum(lost)), data.where


def test_elided_history_says_what_it_costs() -> None:
    """Catches an agent that cuts old tool messages out of its history not being told what that costs (case
    14)."""
    head, tool, stub = list(range(100)), list(range(200, 250)), [7, 8]
    first = head + tool + [1] * 20
    data = dataset(first, head + stub + [1] * 20 + [2] * 10, conversations=[0, 0])
    made, _ = forecast(data, [10], Planner(10))
    assert (made.rewritten_prompts, made.rewritten_tokens, made.thought_tokens) == (1, 131 - 100, 0)


@pytest.mark.slow
def test_what_a_forecast_holds_is_bounded_and_then_its_numbers_are_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a plan keeps the prompts of the whole input, 2 KB a line; or calls exact what a bounded tree forgot."""
    monkeypatch.setattr(CoverageTree.__init__, "__defaults__", (1000, 40))
    held = []
    for count in (100, 300):
        prompts = [tuple([line % 5] * 20 + random.choices(range(1000), k=20)) for line in range(count)]
        data = dataset(*prompts, *prompts[:5], range(2000))
        tracemalloc.start()
        forecaster = Forecaster(Planner(4), BLOCKS, 500)
        for line, prompt in enumerate(data.prompts):
            forecaster.add(np.array(prompt, np.int32), line, len(prompt) - 1)
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        made = forecaster.finish()
        ideal = 20 * (count - 5) + 5 * 39  # of the last one, which the trees cannot hold, nothing
        assert made.unique_tokens_is_bound and made.unique_tokens > made.prompt_tokens - ideal - 5
        for policy, one in made.grids[1].items():
            assert one.ideal_is_bound and one.cached_tokens < ideal, policy
        assert made.ideal_is_bound and made.ideal_tokens < ideal
    assert held[1] < 1.3 * held[0]


def test_nothing_to_share_and_nothing_at_all() -> None:
    """Catches a division by no tokens, and reuse where there is none."""
    empty, _ = forecast(dataset(), [1, 64], Planner(64))
    assert (empty.requests, empty.ideal_hit_rate, empty.grids[64]["all"].hit_rate) == (0, 0.0, 0.0)
    alone = forecast(dataset([1, 2, 3], [4, 5, 6]), [2, 64], Planner(64))[0].grids[2]
    assert [(table.cached_tokens, table.snapshots_read) for table in alone.values()] == [(0, 0)] * 3
    assert (alone["all"].snapshots_written, alone["planned"].snapshots_written) == (2, 0)
