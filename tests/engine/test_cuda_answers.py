"""What a request may ask of its answers, on a CUDA device: several of them, settings of sampling, scores of the prompt.
The CPU says what is right; with exact products, company and caches change no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from apcbatch import Engine, Request, Result
from tests.engine.runs import by_id
from tests.engine.test_forks import alone, check_same, several
from tests.engine.test_scoring import scored
from tests.tiny import FAMILIES

pytestmark = pytest.mark.cuda

ROOM = 64 << 20


def run(folder: Path, requests: list[Request], **options: object) -> dict[str, Result]:
    engine = Engine(folder, **{"device": "cuda", "block_size": 16, "pool_size_bytes": ROOM, **options})
    try:
        return by_id(engine.run([replace(request) for request in requests]))
    finally:
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["all", "none"])
@pytest.mark.parametrize("max_running", [2, 16])
def test_each_of_several_answers_is_one_of_its_own(
    family: str, dtype: str, policy: str, max_running: int, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Catches a fork that reads a state or a page of the device which another one has written to."""
    folder, requests = tiny_checkpoint(family), several()
    expected = run(folder, alone(requests), dtype=dtype, policy="none", max_running=1)
    found = run(folder, requests, dtype=dtype, policy=policy, max_running=max_running)
    check_same(requests, found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_choose_like_on_the_cpu(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches logits that are changed by a setting before another row of the device is read."""
    folder, requests = tiny_checkpoint(family), several()
    greedy = [
        Request(
            f"{request.id} {name}", request.token_ids, max_tokens=9, ignore_eos=True, logprobs=True, **{name: value}
        )
        for request in requests
        for name, value in {
            "repetition_penalty": 1.7,
            "presence_penalty": 1.5,
            "logit_bias": {5: 3.0, 7: -2.0},
            "allowed_token_ids": list(range(3, 40)),
            "top_logprobs": 4,
        }.items()
    ]
    on_cpu = run(folder, greedy, device="cpu", policy="none")
    on_device = run(folder, greedy, policy="all", max_running=8)
    for key, result in on_cpu.items():
        assert on_device[key].error is None
        assert on_device[key].token_ids == result.token_ids, key
        assert on_device[key].logprobs == pytest.approx(result.logprobs, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_cpu(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches the log-probability of a neighbour's row or token, cached and cold."""
    folder, requests = tiny_checkpoint(family), scored(11)
    on_cpu = run(folder, requests, device="cpu", policy="none")
    for options in ({"policy": "none"}, {"policy": "all", "max_batch_tokens": 50}):
        on_device = run(folder, requests, **options)
        for key, result in on_cpu.items():
            assert on_device[key].error is None
            if result.scores is None:
                assert on_device[key].scores is None
                continue
            theirs = on_device[key].scores
            assert theirs is not None
            assert theirs.logprobs == pytest.approx(result.scores.logprobs, rel=1e-3, abs=1e-4)
