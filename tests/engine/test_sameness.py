"""Cached answers equal cold ones bit for bit on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from apcbatch import Engine, Request
from tests.tiny import FAMILIES, VOCAB

Answers = dict[str, tuple[list[int], list[float]]]


def agent_prompts(seed: int, conversations: int = 5) -> list[Request]:
    """Growing conversations with shared stems and forks: what agents send."""
    source = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [source.randrange(1, VOCAB) for _ in range(count)]

    stem, requests = draw(source.randrange(60, 200)), []
    for conversation in range(conversations):
        history = stem[: source.randrange(30, len(stem))] + draw(source.randrange(1, 40))
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
def test_sampling_does_not_depend_on_batch_mates(family: str, tiny_checkpoint) -> None:
    """Catches a random stream shared between requests, or drawn in the order of steps."""
    seed = random.randrange(1 << 30)
    folder = tiny_checkpoint(family)
    requests = agent_prompts(seed)
    for request in requests:
        request.temperature, request.top_p, request.seed = 4.0, 0.9, 7
    alone = answers(Engine(folder, policy="none", max_running=1), requests)
    together = answers(Engine(folder, max_running=32, pool_size_bytes=256 << 20), requests[::-1])
    assert alone == together, f"seed {seed}"
    for request in requests:
        request.seed = 8
    other = answers(Engine(folder, max_running=32, pool_size_bytes=256 << 20), requests)
    assert other != alone


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
