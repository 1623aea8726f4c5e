"""The engine does what the plan says: the same cached tokens request by request, the same snapshots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from apcbatch import Engine, Request
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Plan, Planner
from tests.plan.plan_oracle import Dataset, make_plan, random_dataset, within_vocabulary
from tests.tiny import VOCAB

PLENTY = 16 << 20

pytestmark = pytest.mark.usefixtures("one_thread")


def follow(engine: Engine, data: Dataset, plan: Plan) -> None:
    """Serve the requests in the plan's order and compare what happened."""
    requests = [
        Request(
            str(index), list(data.prompts[index]), max_tokens=1, keep_answer=False, ignore_eos=True,
            plan=plan.requests[index],
        )
        for index in plan.order
    ]  # fmt: skip
    results = {int(result.id): result for result in engine.run(requests)}
    for index, todo in enumerate(plan.requests):
        found = results[index]
        assert found.error is None, data.where
        assert (found.cached_tokens, found.ideal_cached_tokens) == (todo.resume_at, todo.ideal), (
            data.where,
            index,
        )
    counters = engine.counters
    assert counters.snapshots_written == counters.snapshots_read == plan.snapshots_written, data.where
    assert counters.snapshots_evicted == 0, data.where


@pytest.mark.parametrize(("max_running", "max_batch_tokens"), [(1, 4096), (1, 23), (2, 23), (32, 23)])
@pytest.mark.parametrize("order", ["auto", "file"])
@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_the_engine_follows_the_plan(
    family: str, order: str, max_running: int, max_batch_tokens: int, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Catches a follower that does not wait for its leader, a snapshot released early or late, and one that nobody
    reads."""
    for seed in range(3):
        data = within_vocabulary(random_dataset(seed), VOCAB)
        for block_size in (1, 3):
            plan = make_plan(data, Planner(block_size, order))
            engine = Engine(
                tiny_checkpoint(family), block_size=block_size, policy="planned", max_running=max_running,
                max_batch_tokens=max_batch_tokens, pool_size_bytes=PLENTY,
            )  # fmt: skip
            follow(engine, data, plan)
            peak, planned = engine.counters.peak_live_snapshots, plan.peak_live_snapshots
            if max_running == 1 and max_batch_tokens > 23:  # a prompt is one pass, as the plan takes it
                assert peak == planned, data.where
            elif max_running == 1:  # what was resumed from may be released before all of the prompt's own are there
                assert (peak > 0) == (planned > 0) and peak <= planned, data.where
            engine.close()


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_the_engine_follows_a_plan_for_little_memory(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a pool that drops what the plan counts on: the plan's bytes are the pool's bytes."""
    for seed in range(6):
        data = within_vocabulary(random_dataset(seed), VOCAB)
        engine = Engine(tiny_checkpoint(family), block_size=2, policy="planned", max_running=1, pool_size_bytes=PLENTY)
        footprint = Footprint(engine._pool._slot_bytes, engine._pool._page_bytes // 64, 64)
        engine.close()
        free = make_plan(data, Planner(2, "file", footprint))
        capacity = int(0.6 * free.peak_live_bytes)
        if capacity < footprint.state_bytes + footprint.page_bytes:
            continue
        plan = make_plan(data, Planner(2, "file", footprint, capacity))
        engine = Engine(
            tiny_checkpoint(family), block_size=2, policy="planned", max_running=1, pool_size_bytes=capacity
        )
        follow(engine, data, plan)
        engine.close()


@pytest.mark.parametrize("max_running", [1, 4])
@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_requests_without_a_plan_run_beside_planned_ones(
    family: str, max_running: int, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Catches a plan that rules requests which have none, or one that is broken by them: each planned request gets
    what its plan says or more, and its twin without a plan the same answer."""
    for seed in range(4):
        data = within_vocabulary(random_dataset(seed), VOCAB)
        plan = make_plan(data, Planner(3))
        twins = [
            Request(
                f"{kind}{index}", list(data.prompts[index]), max_tokens=3, ignore_eos=True, logprobs=True,
                plan=plan.requests[index] if kind == "planned" else None,
            )
            for index in plan.order for kind in ("planned", "plain")
        ]  # fmt: skip
        engine = Engine(
            tiny_checkpoint(family), block_size=3, policy="planned", max_running=max_running, max_batch_tokens=40,
            pool_size_bytes=PLENTY,
        )  # fmt: skip
        results = {result.id: result for result in engine.run(twins)}
        engine.close()
        for index, todo in enumerate(plan.requests):
            one, twin = results[f"planned{index}"], results[f"plain{index}"]
            assert one.error is None and twin.error is None, data.where
            assert (one.token_ids, one.logprobs) == (twin.token_ids, twin.logprobs), (data.where, index)
            assert one.cached_tokens >= todo.resume_at, (data.where, index)
        assert any(results[f"plain{index}"].cached_tokens for index in range(len(data.prompts))), data.where
