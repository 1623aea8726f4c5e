"""The what-if tables against the engine serving the same requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apcbatch import Engine, Request
from apcbatch.plan.planner import Planner
from apcbatch.plan.prefix_tree import PrefixTree
from tests.effort import table, tries
from tests.plan.plan_oracle import Dataset, random_dataset, within_vocabulary
from tests.tiny import FAMILIES, VOCAB
from tests.tuning.forecasts import forecast


def check(checkpoint: Path, policy: Any, order: str, max_running: int, seed: int) -> None:
    """Serve a random forest, where some requests have several answers, are scored from somewhere on, or fail at their
    first token; the engine reports what the table says, request by request, but for those that fail."""
    source, forest = random.Random(seed), within_vocabulary(random_dataset(seed), VOCAB)
    requests, conversations, tree = [], forest.conversations, PrefixTree()
    for index, prompt in enumerate(forest.prompts):
        kinds: list[dict[str, Any]] = [
            *3 * [{}],
            {"n": source.randint(2, 4), "temperature": 1.0},
            {"score_from": source.randint(1, len(prompt))},
            {"logit_bias": dict.fromkeys(range(VOCAB), float("-inf"))},
        ]
        request = Request(str(index), list(prompt), max_tokens=1 + index % 3, keep_answer=False, ignore_eos=True)
        requests.append(replace(request, **source.choice(kinds)))
    for request, conversation in zip(requests, conversations, strict=True):
        tree.add(np.array(request.token_ids, np.int32), conversation, request.resumable)
    planner = Planner(3, order)
    data = Dataset([tuple(request.token_ids) for request in requests], conversations)
    made, seen = forecast(data, [3], planner, [request.resumable for request in requests])
    table, plan = made.grids[3][policy], planner.plan(tree)
    served = seen.of(policy, 3)
    engine = Engine(
        checkpoint, block_size=3, policy=policy, max_running=max_running, max_batch_tokens=23,
        pool_size_bytes=64 << 20,
    )  # fmt: skip
    work = requests
    if policy == "planned":
        work = [replace(requests[index], plan=plan.requests[index]) for index in plan.order]
    results = {int(result.id): result for result in engine.run(work)}
    answered = {index: result for index, result in results.items() if result.error is None}
    assert [results[i].error is None for i in range(len(requests))] == [not one.logit_bias for one in requests]
    assert {i: one.cached_tokens for i, one in answered.items()} == {i: served[i].resume_at for i in answered}, seed
    if policy == "planned":
        assert {i: one.ideal_cached_tokens for i, one in answered.items()} == {i: served[i].ideal for i in answered}
    tokens = [tuple(requests[index].token_ids) for index in answered]
    assert engine.counters.unique_tokens == len({one[:end] for one in tokens for end in range(1, len(one) + 1)}), seed
    assert engine.counters.snapshots_written == table.snapshots_written, seed
    for index, one in answered.items():
        if requests[index].score_from == 1 and one.ideal_cached_tokens:
            assert one.miss_reason == "disabled", seed
    engine.close()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("max_running", [1, 2, 8])
@pytest.mark.parametrize("policy", ["all", "last", "planned"])
def test_the_engine_agrees(policy: str, max_running: int, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches the engine and the tables drifting apart, requests side by side that overtake each other or one that
    needs more slots, failed ones that are counted, and a scored prompt that is called cold."""
    every = [family for family in FAMILIES if family not in ("falcon_mamba", "qwen3_next")]  # as mamba, qwen3_5_moe
    orders = [("mamba", "file"), *((family, random.choice(["short first", "long first"])) for family in every)]
    for family, order in orders:
        for seed in random.sample(range(10**6), tries(10)):
            check(tiny_checkpoint(family), policy, order, max_running, seed)


@table("policy, order, max_running, seed", [
    # A prompt that ends on a boundary recomputed its last block, and promised that boundary although its snapshot is
    # held; who waited for the first one waited again, and was overtaken by an equal request behind it.
    ("all", "file", 2, 443), ("all", "file", 6, 105), ("all", "file", 6, 444835),
    # A request waited for a snapshot that is there, since another request will keep it too.
    ("last", "short first", 8, 125088),
    # A prompt overtook a scored one that waits for a short prefix, and computed what that one will publish.
    ("last", "file", 8, 90958), ("last", "short first", 8, 408667),
])  # fmt: skip
def test_nobody_waits_for_what_is_there(
    policy: str, order: str, max_running: int, seed: int, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Fault: a wait for what is there, or none for what is being computed, in forests that were drawn once."""
    check(tiny_checkpoint("mamba"), policy, order, max_running, seed)
