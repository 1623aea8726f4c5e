"""The what-if tables against the engine serving the same requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from apcbatch import Engine, Request
from apcbatch.plan.forecast import forecast
from apcbatch.plan.planner import Planner
from tests.plan.plan_oracle import random_dataset, within_vocabulary
from tests.tiny import VOCAB


def check(checkpoint: Path, policy: str, max_running: int, seed: int) -> None:
    """Serve a random dataset; the engine reports what the table says, request by request."""
    data = within_vocabulary(random_dataset(seed), VOCAB)
    table = forecast(data.tree(), [3], Planner(3, "file")).grids[3][policy]
    engine = Engine(
        checkpoint, block_size=3, policy=policy, max_running=max_running, max_batch_tokens=23,
        pool_size_bytes=256 << 20,
    )  # fmt: skip
    requests = [
        Request(str(index), list(prompt), max_tokens=1 + index % 3, keep_answer=False, ignore_eos=True)
        for index, prompt in enumerate(data.prompts)
    ]
    results = {result.id: result for result in engine.run(requests)}
    assert [results[request.id].cached_tokens for request in requests] == table.resume_at, data.where
    assert engine.counters.snapshots_written == table.snapshots_written, data.where
    assert engine.counters.snapshots_read == table.snapshots_read, data.where
    engine.close()


@pytest.mark.parametrize(("policy", "max_running"), [("all", 1), ("all", 2), ("all", 6), ("all", 32), ("last", 1)])
@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_the_engine_agrees(family: str, policy: str, max_running: int, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches the engine and the tables drifting apart, and requests side by side that overtake each other: same
    requests, same cached tokens, same snapshots."""
    check(tiny_checkpoint(family), policy, max_running, random.randrange(10**6))


@pytest.mark.parametrize(("max_running", "seed"), [(2, 443), (6, 105), (6, 444835)])
def test_nobody_waits_for_what_is_there(max_running: int, seed: int, tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: a prompt that ends on a boundary recomputes its last block, and promises that boundary although its
    snapshot is held; who waited for the first one waits again, and is overtaken by an equal request behind it."""
    check(tiny_checkpoint("mamba"), "all", max_running, seed)
