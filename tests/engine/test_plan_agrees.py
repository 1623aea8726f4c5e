"""The engine does what the plan says: the same cached tokens request by request, the same snapshots."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apcbatch import Engine, Request
from apcbatch.plan.planner import Planner
from apcbatch.plan.tree_shape import ORDERS
from apcbatch.types import RequestPlan
from tests.effort import tries
from tests.engine.opened import OpenedEngine
from tests.engine.runs import planned_by_window, serve, tokens, told
from tests.engine.test_pending_handover import WAYS
from tests.plan.plan_oracle import dataset, make_plan, random_dataset, random_windows, within_vocabulary
from tests.tiny import VOCAB

PLENTY = 16 << 20


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "jamba"])
@pytest.mark.parametrize("max_running", [1, 8])
def test_the_engine_follows_windows(family: str, max_running: int, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a snapshot that is dropped before the next window has read it, or held for ever, also where requests
    fail; and a request that waits for ever."""
    for number in range(tries(40)):
        data, fails = within_vocabulary(random_dataset(random.randrange(10**6)), VOCAB), number % 2
        options = {"max_running": max_running, "max_batch_tokens": 23, "pool_size_bytes": PLENTY}
        engine = OpenedEngine(tiny_checkpoint(family), block_size=2, policy="planned", **options)
        planner = Planner(2, random.choice(ORDERS), engine.footprint, PLENTY)
        plans: dict[str, RequestPlan] = {}

        def requests(engine=engine, data=data, fails=fails, planner=planner, plans=plans) -> Iterator[Request]:
            for request, plan in planned_by_window(engine, data, random_windows(data), planner):
                plans[request.id] = plan
                yield replace(request, top_p=5.0) if fails and random.random() < 0.3 else request

        results = list(engine.run(requests()))
        assert sorted(int(result.id) for result in results) == list(range(len(data.prompts)))
        for result in results:
            assert fails or result.error is None
            assert fails or result.cached_tokens == plans[result.id].resume_at, data.where
        assert fails or not len(engine.parts.pool), data.where
        assert not any(snapshot.reads_left for snapshot in engine.parts.pool), data.where
        engine.close()


@pytest.mark.parametrize("max_running", [1, 4])
def test_requests_without_a_plan_run_beside_planned_ones(folder: Path, max_running: int) -> None:
    """Catches a plan that rules requests which have none, or one that is broken by them: each planned request gets
    what its plan says or more, and its twin without a plan the same answer."""
    restored = 0
    for seed in range(tries(20)):
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
            folder, block_size=3, policy="planned", max_running=max_running, max_batch_tokens=40,
            pool_size_bytes=PLENTY,
        )  # fmt: skip
        results = serve(engine, twins)
        for index, todo in enumerate(plan.requests):
            one, twin = results[f"planned{index}"], results[f"plain{index}"]
            assert one.error is None and twin.error is None, data.where
            assert told(one) == told(twin), (data.where, index)
            assert one.cached_tokens >= todo.resume_at, (data.where, index)
        restored += sum(results[f"plain{index}"].cached_tokens for index in range(len(data.prompts)))
    assert restored, "no request without a plan resumed from anything"


@pytest.mark.parametrize("fails", [None, "at its first token", "at submission"])
def test_equal_prompts_share_one_prefill(folder: Path, fails: str | None) -> None:
    """Catches an equal prompt that computes more than its last token, draws as another one does, or has no answer where
    the first fails; and a snapshot off the grid that is not listed."""
    prompt = tokens(37, 0)
    plan = make_plan(dataset(*[prompt] * 5), Planner(16))
    drawn: dict[str, Any] = {"max_tokens": 8, "temperature": 2.0, "logprobs": True}
    requests = [Request(str(i), prompt, seed=i, plan=plan.requests[i], **drawn) for i in plan.order]
    if fails:
        requests[0] = replace(requests[0], **WAYS[fails])
    results = serve(Engine(folder, policy="planned", block_size=16, max_running=8), requests)
    cold = serve(Engine(folder, policy="none", max_running=8), requests)
    assert [told(results[one.id]) for one in requests] == [told(cold[one.id]) for one in requests]
    assert len({tuple(results[one.id].token_ids) for one in requests}) > 1
    cached = [results[one.id].cached_tokens for one in requests if results[one.id].error is None]
    # the one that fails at its first token leaves its sound snapshot to the others
    assert (
        cached == {None: [0, 36, 36, 36, 36], "at its first token": [36] * 4, "at submission": [0, 36, 36, 36]}[fails]
    )
    engine = Engine(folder, policy="planned", block_size=16, pool_size_bytes=PLENTY)
    list(engine.run([Request("", prompt, max_tokens=1, plan=RequestPlan(keep=(20, 36), reads=(1, 1)))]))
    assert engine.boundaries(prompt) == [20, 36] and engine.boundaries(prompt[:30]) == [20]
    engine.close()
