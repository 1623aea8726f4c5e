"""A request that fails changes no other request's answer, nor its reuse beyond the tokens that it was to compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apcbatch import Engine
from apcbatch.engine import step
from apcbatch.plan.planner import Planner
from tests.effort import tries
from tests.engine.runs import by_id, serve, tokens
from tests.engine.test_given_back import ROOMY, Books
from tests.engine.test_tight_pool import requests_of
from tests.plan.plan_oracle import dataset, make_plan, random_dataset, within_vocabulary
from tests.tiny import VOCAB

NO_TOKEN = {token: float("-inf") for token in range(VOCAB)}
WAYS: dict[str, dict[str, Any]] = {
    "at its first token": {"logit_bias": NO_TOKEN},
    "after scoring": {"logit_bias": NO_TOKEN, "score_from": 1000},
    "at submission": {"top_p": 5.0},
    "with several answers": {"logit_bias": NO_TOKEN, "n": 3, "temperature": 1.0},
    "for lack of pages": {"max_tokens": 1 << 20},
    "with its pass": {},
}


@pytest.fixture
def failing_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], None]:
    """Have those passes raise whose number a function is true of."""
    run_pass, numbers = step.run_pass, iter(range(10**9))

    def fail(which: Callable[[int], bool]) -> None:
        def maybe(*arguments: Any) -> Any:
            if which(next(numbers)):
                raise RuntimeError("the pass broke")
            return run_pass(*arguments)

        monkeypatch.setattr(step, "run_pass", maybe)

    return fail


@pytest.mark.parametrize(("family", "way"), [
    ("mamba", "at its first token"), ("jamba", "at its first token"), ("mamba", "after scoring"),
    ("mamba", "at submission"), ("jamba", "with several answers"), ("jamba", "for lack of pages"),
    ("jamba", "with its pass"),
])  # fmt: skip
def test_the_others_go_on_sharing(
    family: str, way: str, tiny_checkpoint: Callable[..., Path], failing_passes: Callable[..., None]
) -> None:
    """Fault: the first of eleven requests that share 1,000 tokens failed, and the ten others restored none of them."""
    stem = tokens(1000, 1)
    data = dataset([*stem, 5, 6], *([*stem, 10 + k, 7] for k in range(10)))
    plan = make_plan(data, Planner(50, "file"))
    first, *others = requests_of(data, plan)
    engine = Engine(tiny_checkpoint(family), block_size=50, policy="planned", max_running=4, pool_size_bytes=ROOMY)
    books = Books(engine)
    failing_passes(lambda number: number == 0 and way == "with its pass")
    results = by_id(list(engine.run([replace(first, **WAYS[way]), *others])))
    assert results.pop("0").error is not None
    assert all(result.error is None for result in results.values())
    was_computed = "token" in way or "scoring" in way or "answers" in way
    found = sorted((one.cached_tokens, one.ideal_cached_tokens, one.miss_reason) for one in results.values())
    assert found == [(1000, 1000, None) if was_computed else (0, 0, "cold")] + 9 * [(1000, 1000, None)]
    books.balance()
    assert not len(books.pool)
    engine.close()


@pytest.mark.parametrize("max_running", [1, 3, 8])
@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_whatever_fails_the_rest_is_reused(
    family: str, max_running: int, tiny_checkpoint: Callable[..., Path], failing_passes: Callable[..., None]
) -> None:
    """Catches a failure, of any kind and at any place of a random forest, that costs the others more prompt tokens than
    the failed requests were to compute themselves, changes an answer, or leaves something held for nobody."""
    failing_passes(lambda number: source.random() < share)
    for seed in random.sample(range(10**6), tries(40)):
        source, share = random.Random(seed), 0.0
        data = within_vocabulary(random_dataset(seed), VOCAB)
        block_size = source.choice([1, 3])
        plan = make_plan(data, Planner(block_size, source.choice(["auto", "file"])))
        options: dict[str, Any] = {"max_running": max_running, "max_batch_tokens": 23, "pool_size_bytes": ROOMY}
        cold = Engine(tiny_checkpoint(family), policy="none", **options)
        expected = serve(cold, requests_of(data, plan))
        share = source.choice([0.0, 0.1, 0.4])
        bad = [WAYS["at its first token"], WAYS["at submission"], {}, {}, {}]
        engine = Engine(tiny_checkpoint(family), block_size=block_size, policy="planned", **options)
        books = Books(engine)
        requests = [replace(request, **source.choice(bad)) for request in requests_of(data, plan)]
        results = by_id(list(engine.run(requests)))
        lost = own = 0
        for name, result in results.items():
            todo, length = plan.requests[int(name)], result.prompt_tokens
            if result.error is not None:
                own += length - todo.resume_at
                continue
            lost += max(0, todo.resume_at - result.cached_tokens)
            assert (result.token_ids, result.logprobs) == (expected[name].token_ids, expected[name].logprobs)
        assert lost <= own, (data.where, lost, own)
        books.balance()
        assert not any(snapshot.reads_left for snapshot in books.pool._held.values()), data.where
        engine.close()
