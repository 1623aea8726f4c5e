"""How many tokens are restored, with the exact numbers of the acceptance cases 8 to 13, 15 and 16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from apcbatch import Engine, Request, Result
from tests.engine.runs import tokens
from tests.tiny import VOCAB

Prompt = list[int]


@pytest.fixture
def engine_of(folder: Path, open_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """An engine of a one-state or a hybrid model."""
    return partial(open_engine, folder)


def serve(engine: Engine, prompt: Prompt, max_tokens: int = 1) -> Result:
    """One request, by itself."""
    (result,) = engine.run([Request("r", prompt, max_tokens=max_tokens, ignore_eos=True)])
    assert result.error is None
    assert result.cached_tokens + result.computed_tokens == result.prompt_tokens == len(prompt)
    return result


def test_the_same_prompt_again(engine_of) -> None:
    """Catches a hit that covers the whole prompt (one token is always computed) and one that stops a block short."""
    engine = engine_of()
    for length, cached in ((15, 0), (16, 0), (17, 16), (1000, 992), (1008, 992), (1024, 1008), (1025, 1024)):
        assert serve(engine, tokens(length, length)).cached_tokens == 0
        assert serve(engine, tokens(length, length)).cached_tokens == cached, length


def test_a_shared_stem(engine_of) -> None:
    """Catches one state kept per prompt: what is shared is reused from its last boundary."""
    engine = engine_of()
    stem = tokens(1000, 1)
    assert [serve(engine, stem + tokens(100, 10 + i)).cached_tokens for i in range(5)] == [0, 992, 992, 992, 992]


def test_forks_in_the_middle(engine_of) -> None:
    """Catches reuse that restarts from the end of a prompt only: forks at 1500 of 2000 resume at 1488."""
    engine = engine_of()
    trunk = tokens(2000, 2)
    serve(engine, trunk)
    forks = [serve(engine, trunk[:1500] + [0] + tokens(499, 20 + i)) for i in range(4)]
    assert [fork.cached_tokens for fork in forks] == [1488] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block_size", "expected"),
    [(16, [0, 1184, 1456, 1712]), (1, [0, 1199, 1459])],
)
def test_a_growing_conversation(block_size: int, expected: list[int], engine_of) -> None:
    """Catches states reached by decoding that are not kept: the answer fed back is reused but for its last token."""
    engine = engine_of(block_size=block_size, pool_size_bytes=64 << 20)
    prompt, cached = tokens(1000, 3), []
    for turn in range(len(expected)):
        result = serve(engine, prompt, max_tokens=200)
        cached.append(result.cached_tokens)
        prompt = prompt + result.token_ids + tokens(60, 30 + turn)
    assert cached == expected


@pytest.mark.parametrize(("max_running", "max_batch_tokens"), [(2, 2048), (6, 100), (32, 2048)])
def test_submitted_together(max_running: int, max_batch_tokens: int, engine_of) -> None:
    """Catches followers that compute the prefix which a leader is computing: each shared token is computed once."""
    engine = engine_of(max_running=max_running, max_batch_tokens=max_batch_tokens)
    stem = tokens(1000, 4)
    requests = [Request(str(i), stem + [i + 1] + tokens(99, 40 + i)) for i in range(6)]
    results = list(engine.run(requests))
    assert sum(result.computed_tokens for result in results) == 1640


def test_the_incremental_agent(engine_of) -> None:
    """Catches a hit of 0: B diverges from A in the middle, and resumes at the third boundary."""
    engine = engine_of(block_size=544)
    tail = tokens(400, 5)
    images = [token for image in range(1, 5) for token in [image] * 700]
    a = images + tokens(3382 - len(images) - len(tail), 6) + tail
    b = a[:1700] + [a[1700] % (VOCAB - 1) + 1] + tokens(4584 - 1701 - len(tail), 7) + tail
    assert (len(a), len(b)) == (3382, 4584)
    assert [serve(engine, prompt).cached_tokens for prompt in (a, a, b, b)] == [0, 3264, 1632, 4352]


def test_elided_history(engine_of) -> None:
    """Catches an agent that rewrites its history being sent back to zero: the last common boundary is used."""
    engine = engine_of()
    head, cached = tokens(300, 8), []
    tools = [tokens(50, 100 + i) for i in range(12)]
    stub = tokens(4, 9)
    for turn in range(6, 12):
        history = [stub if i < turn - 5 else tools[i] for i in range(turn)]
        cached.append(serve(engine, head + [token for part in history for token in part]).cached_tokens)
    # From one turn to the next, the first difference is where one more tool message has become a stub.
    assert cached == [0] + [(300 + 4 * k) // 16 * 16 for k in range(1, 6)]


def test_shorter_than_a_block(engine_of) -> None:
    """Catches a silent zero: a prefix shorter than one block says so, with the minimum."""
    engine = engine_of()
    prompt = tokens(15, 10)
    assert serve(engine, prompt).miss_reason == "cold"
    again = serve(engine, prompt)
    assert (again.cached_tokens, again.ideal_cached_tokens) == (0, 14)
    assert (again.miss_reason, again.miss_detail) == ("shorter_than_block", "shorter_than_block (minimum 16)")


def test_a_fork_below_the_first_boundary_says_where(engine_of) -> None:
    """Catches a fork reported as anything else: the position and the first boundary are named."""
    engine = engine_of(block_size=256)
    serve(engine, tokens(38, 11) + [1] + tokens(300, 12))
    result = serve(engine, tokens(38, 11) + [2] + tokens(300, 13))
    assert (result.cached_tokens, result.ideal_cached_tokens, result.miss_reason) == (0, 38, "diverged")
    assert result.miss_detail == "diverged at token 38 (first boundary 256)"


def test_hits_are_explained(engine_of) -> None:
    """Catches a hit short of the ideal without a reason, and a reason on a hit that has everything."""
    engine = engine_of()
    prompt = tokens(100, 14)
    serve(engine, prompt)
    short = serve(engine, prompt)
    assert (short.cached_tokens, short.ideal_cached_tokens, short.miss_reason) == (96, 99, "below_grid")
    full = serve(engine, prompt[:97])
    assert (full.cached_tokens, full.ideal_cached_tokens, full.miss_reason) == (96, 96, None)


def test_policy_last_keeps_one_boundary_a_prompt(engine_of) -> None:
    """Catches `last` keeping more than the end of each prompt and answer."""
    engine = engine_of(policy="last")
    prompt = tokens(1000, 15)
    first = serve(engine, prompt, max_tokens=100)
    assert engine.boundaries(prompt + first.token_ids) == [992, 1088]
    assert serve(engine, prompt).cached_tokens == 992
    fork = serve(engine, prompt[:500] + [0] + tokens(99, 16))
    assert (fork.cached_tokens, fork.miss_reason) == (0, "diverged")


def test_policy_none_keeps_nothing(engine_of) -> None:
    """Catches a hit, or a silent zero, with the policy off."""
    engine = engine_of(policy="none")
    prompt = tokens(200, 17)
    serve(engine, prompt)
    again = serve(engine, prompt)
    assert (again.cached_tokens, again.cached_from, again.miss_reason) == (0, "none", "disabled")
    assert engine.boundaries(prompt) == []


@pytest.mark.parametrize("policy", ["none", "all"])
def test_the_ideal_counts_what_runs_at_the_same_time(policy: str, engine_of) -> None:
    """Catches an ideal that falls with the number of requests that run together: it is of prompts, not of timing."""
    stem = tokens(10, 7)  # shorter than a block: nobody waits for it
    requests = [Request(str(i), stem + tokens(20, 70 + i), max_tokens=1) for i in range(6)]
    engine = engine_of(policy=policy, max_running=6)
    ideals = {result.id: result.ideal_cached_tokens for result in engine.run(requests)}
    assert sorted(ideals.values()) == [0, 10, 10, 10, 10, 10]


def test_a_small_pool_forgets_and_says_so(engine_of) -> None:
    """Catches a pool that outgrows its size, and a dropped snapshot that is not reported as evicted."""
    engine = engine_of(pool_size_bytes=1 << 20)
    prompt = tokens(600, 18)
    serve(engine, prompt)
    for i in range(30):
        serve(engine, tokens(600, 200 + i))
    assert engine.parts.pool.held_bytes <= 1 << 20
    again = serve(engine, prompt)
    assert (again.cached_tokens, again.miss_reason) == (0, "evicted")


def test_boundaries_and_snapshots_are_those_of_the_prefix(engine_of) -> None:
    """Catches a snapshot of another shape, or one for a prefix that is not held."""
    engine = engine_of()
    prompt = tokens(40, 19)
    serve(engine, prompt)
    assert engine.boundaries(prompt) == [16, 32]
    assert engine.snapshot(prompt) is None
    snapshot = engine.snapshot(prompt[:32])
    if "delta" in snapshot:
        assert snapshot["delta"].shape == (3, 4, 8, 1, 12)
        assert snapshot["conv"].shape == (3, 80, 3) and snapshot["kv"].shape == (1, 2, 32, 2, 16)
        return
    mamba_layers, d_inner, d_state = snapshot["ssm"].shape
    assert (d_state, snapshot["ssm"].dtype) == (8, snapshot["ssm"].float().dtype)
    assert snapshot["conv"].shape == (mamba_layers, d_inner, 3)
    if "kv" in snapshot:
        assert snapshot["kv"].shape == (1, 2, 32, 2, 10)


def test_policy_planned_without_a_plan_keeps_where_prompts_were_seen_to_fork(engine_of) -> None:
    """Catches a fork that is computed again by every prompt which leaves there: the second one keeps its boundary."""
    engine = engine_of(policy="planned")
    trunk = tokens(100, 20)
    forks = [trunk[:50] + [seed] + tokens(60, 20 + seed) for seed in range(3)]
    assert [serve(engine, prompt).cached_tokens for prompt in (trunk, *forks)] == [0, 0, 48, 48]
    assert engine.boundaries(forks[0]) == [48, 96]
