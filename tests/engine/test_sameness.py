"""Cached answers equal cold ones bit for bit on the CPU."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from apcbatch import Engine, Request
from apcbatch.engine import step
from apcbatch.plan.planner import Planner
from apcbatch.plan.tree_shape import ORDERS
from tests.engine.opened import OpenedEngine, rows_take
from tests.engine.runs import by_id, told
from tests.engine.test_given_back import Books
from tests.plan.plan_oracle import dataset, make_plan
from tests.tiny import FAMILIES, VOCAB

Answers = dict[str, tuple[list[int], list[float]]]


def agent_prompts(seed: int, conversations: int = 5) -> list[Request]:
    """Growing conversations with shared prefixes and forks: what agents send."""
    source = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [source.randrange(1, VOCAB) for _ in range(count)]

    prefix, requests = draw(source.randrange(60, 200)), []
    for conversation in range(conversations):
        history = prefix[: source.randrange(30, len(prefix))] + draw(source.randrange(1, 40))
        for turn in range(source.randrange(1, 5)):
            requests.append(
                Request(
                    f"{conversation}#{turn}",
                    list(history),
                    max_tokens=source.randrange(1, 9),
                    ignore_eos=True,
                    logprobs=True,
                )
            )
            history = history + draw(source.randrange(1, 90))
    return requests


def answers(engine: Engine, requests: list[Request]) -> Answers:
    """Tokens and log-probabilities by request."""
    results = list(engine.run(requests))
    assert all(result.error is None for result in results), [r.error for r in results if r.error]
    engine.close()
    return {result.id: (result.token_ids, result.logprobs or []) for result in results}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.drawn(4)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_of_running_gives_the_same_bits(family: str, dtype: str, tiny_checkpoint, tmp_path) -> None:
    """Catches arithmetic that depends on the grid, the budget, the batch mates, the order, the threads, the policy,
    or on whether a state was computed here or restored from RAM or disk."""
    seed = random.randrange(1 << 30)
    folder = tiny_checkpoint(family)
    requests = agent_prompts(seed)
    shuffled = random.Random(seed).sample(requests, len(requests))
    cold = answers(Engine(folder, dtype=dtype, policy="none", max_running=1, max_batch_tokens=8192), requests)
    ways: list[tuple[dict, list[Request]]] = [
        ({"block_size": 1}, requests),
        ({"block_size": 16, "max_running": 8, "max_batch_tokens": 100}, requests),
        ({"block_size": 64, "max_running": 32, "max_batch_tokens": 512}, shuffled),
        ({"block_size": 544, "max_running": 3, "max_batch_tokens": 7}, requests),
        ({"block_size": 16, "policy": "last", "max_running": 2, "max_batch_tokens": 33}, shuffled),
        ({"block_size": 16, "store": tmp_path / "s", "max_running": 4}, requests),
        ({"block_size": 16, "store": tmp_path / "s", "max_running": 4}, requests),
        ({"block_size": 48, "store": tmp_path / "s", "max_running": 32}, shuffled),
    ]
    for way, order in ways:
        torch.set_num_threads(random.Random(str(way)).choice([1, 2]))
        warm = answers(Engine(folder, dtype=dtype, pool_size_bytes=256 << 20, **way), order)
        differing = [key for key in cold if cold[key] != warm[key]]
        assert not differing, f"seed {seed}, {family} {dtype} {way}: {differing[:3]} differ from the cold run"


@pytest.mark.drawn(8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_reached_by_decoding_equals_one_reached_by_prefill(family: str, dtype: str, tiny_checkpoint) -> None:
    """Catches a decode step whose arithmetic differs from prefill's: the same prefix gives the same bytes."""
    seed = random.randrange(1 << 30)
    prompt = agent_prompts(seed, 1)[0].token_ids
    decoded = Engine(tiny_checkpoint(family), dtype=dtype, block_size=16, pool_size_bytes=256 << 20)
    (first,) = decoded.run([Request("a", prompt, max_tokens=60, ignore_eos=True)])
    history = prompt + first.token_ids
    prefilled = Engine(tiny_checkpoint(family), dtype=dtype, block_size=16, pool_size_bytes=256 << 20)
    list(prefilled.run([Request("b", history, max_tokens=1)]))
    position = decoded.boundaries(history)[-1]
    assert position > len(prompt)
    ours, theirs = decoded.snapshot(history[:position]), prefilled.snapshot(history[:position])
    for part in ours:
        assert torch.equal(ours[part], theirs[part]), f"seed {seed}: {part} at {position} differs"


@pytest.mark.drawn(4)
def test_snapshots_do_not_depend_on_how_they_were_reached(family: str, tiny_checkpoint, tmp_path) -> None:
    """Catches a snapshot that is a function of more than its tokens: chunks, batch mates, RAM or disk."""
    seed = random.randrange(1 << 30)
    requests = agent_prompts(seed, 3)
    prompt = list(requests[-1].token_ids)
    at = len(prompt) // 16 * 16
    one = Engine(tiny_checkpoint(family), block_size=16, pool_size_bytes=256 << 20, store=tmp_path / "s")
    list(one.run(requests[-1:]))
    expected = one.snapshot(prompt[:at])
    one.close()
    disk = Engine(tiny_checkpoint(family), block_size=16, pool_size_bytes=256 << 20, store=tmp_path / "s")
    many = Engine(tiny_checkpoint(family), block_size=8, pool_size_bytes=256 << 20, max_batch_tokens=13)
    list(many.run(requests))
    for engine in (disk, many):
        found = engine.snapshot(prompt[:at])
        for part in expected:
            assert torch.equal(expected[part], found[part]), f"seed {seed}: {part} differs"
        engine.close()


class Walk:
    """A form and an end of an answer that depend on all its tokens, each of which must come once."""

    def __init__(self) -> None:
        self._sum = 0

    def fill(self, mask: np.ndarray) -> bool:
        mask[:] = -1 if self._sum % 2 else 0x55555555  # even tokens
        return True

    def accept(self, token: int, may_end: bool = False) -> Any:
        self._sum = 31 * self._sum + token + 1
        return f"at {self._sum % 1000}" if may_end and self._sum % 53 == 0 else None


@pytest.mark.drawn(4)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["all", "last", "planned", "none", "a plan"])
@pytest.mark.parametrize("how", ["one pass", "ahead", "two stages", "three stages", "a failing pass", "an abort"])
@pytest.mark.parametrize("way", ["replays", "writes states"], indirect=True)
def test_preempted_answers_have_the_same_bits(
    policy: str, how: str, way: str, tiny_checkpoint, stages, monkeypatch
) -> None:
    """Fault: an answer that gave its pages up is drawn, scored, formed or ended in another way once it continues, never
    comes to its end, or leaves something held; or all pages are reserved at admission."""
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
    folder = tiny_checkpoint(source.choice(["jamba", "qwen3_5"]), tie_word_embeddings=False)
    requests = agent_prompts(seed, 2)
    requests[:0] = [
        Request(str(one), [one] * 10, logprobs=True, keep_answer=one < 2, draft=one > 4) for one in range(1, 7)
    ]
    for number, request in enumerate(requests):
        request.max_tokens = source.choice([3, 70, 200]) if number > 5 else 310
        request.ignore_eos = number % 2 == 0 or number < 6
        if number < 6:
            continue
        request.temperature, request.n = source.choice([(0.0, 1), (1.0, 1), (1.0, 3), (1.5, 5)])
        request.keep_answer = number % 3 != 2
        if number % 4 == 1:
            request.score_from = len(request.token_ids) // 2 + 1
            request.score_top = 2
        request.constraint = Walk if number % 5 == 4 else None
        request.ending = Walk if number % 5 == 3 else None
        request.presence_penalty = number % 3 / 2
        request.top_logprobs = 2 * (number % 4 == 3)
    cold = Engine(folder, policy="none", pool_size_bytes=256 << 20)
    expected = {one.id: told(one) for one in cold.run(requests)}
    longest = max(-(-(len(one.token_ids) + one.max_tokens) // 64) for one in requests) + 1
    monkeypatch.setattr("apcbatch.engine.page_tables.RESERVED_TOKENS", source.choice([1, 20, 128]))
    stages({"two stages": 2, "three stages": 3}.get(how, 1))
    with rows_take(lambda rows: 1.0):
        engine = OpenedEngine(
            folder, how != "one pass", block_size=16, policy="planned" if policy == "a plan" else policy,
            max_running=source.choice([4, 8]), max_batch_tokens=source.choice([40, 512]),
            pool_size_bytes=source.choice([longest, longest + 3]) * cold.footprint.page_bytes,
        )  # fmt: skip
    cold.close()
    books = Books(engine)
    if policy == "a plan":
        data = dataset(*[one.token_ids for one in requests])
        plan = make_plan(data, Planner(16, random.choice(ORDERS), engine.footprint))
        requests = [replace(requests[index], plan=plan.requests[index]) for index in plan.order]
    if how == "an abort":
        for request in requests:
            engine.submit(request)
        while engine.num_unfinished and not books.scheduler.places.preempted:
            engine.step()
        engine.abort()
        books.balance()
    if how == "a failing pass":
        run_pass, passes = step.run_pass, itertools.count()

        def fails(*arguments: Any) -> Any:
            if books.scheduler.places.preempted and next(passes) in (5, 50):
                raise RuntimeError("the pass broke")
            return run_pass(*arguments)

        monkeypatch.setattr(step, "run_pass", fails)
    found = by_id(engine.run(requests))
    assert sorted(found) == sorted(expected), f"seed {seed}"
    failed = {name for name, one in found.items() if one.error is not None}
    assert how == "a failing pass" or not failed, f"seed {seed}: {found[min(failed)].error}"
    differing = [name for name in expected if name not in failed and told(found[name]) != expected[name]]
    assert not differing, f"seed {seed}: {differing}"
    for one in found.values():
        assert one.error or one.cached_tokens + one.computed_tokens == one.prompt_tokens
    counters = engine.counters
    assert counters.preempted or policy == "a plan", f"seed {seed}"
    assert counters.recomputed_tokens or not counters.preempted or failed
    books.balance()
    engine.close()
