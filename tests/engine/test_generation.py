"""Where answers end and how tokens are drawn, against `transformers` and exact probabilities."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from apcbatch import Engine, Request, Result
from apcbatch.engine.sampler import draw, request_key
from tests.effort import table, tries
from tests.tiny import VOCAB, load_oracle

PROMPT = torch.randint(1, VOCAB, (21,), generator=torch.Generator().manual_seed(5)).tolist()
NEW_TOKENS = 48


def answer(folder: Path, **options: object) -> Result:
    """The engine's answer to PROMPT."""
    engine = Engine(folder, pool_size_bytes=16 << 20)
    (result,) = engine.run([Request("r", PROMPT, **{"max_tokens": NEW_TOKENS, **options})])
    engine.close()
    assert result.error is None
    return result


def with_eos(
    folder: Path, target: Path, in_config: object, in_generation_config: object = None, of_tokenizer: int | None = None
) -> Path:
    """A copy of a checkpoint that ends its answers with these ids; None: the file says nothing."""
    shutil.copytree(folder, target)
    if of_tokenizer is not None:
        own = {"eos_token": "</s>", "added_tokens_decoder": {of_tokenizer: {"content": "</s>"}}}
        (target / "tokenizer_config.json").write_text(json.dumps(own))
    for name, eos in (("config.json", in_config), ("generation_config.json", in_generation_config)):
        values = json.loads((target / name).read_text())
        values.pop("eos_token_id", None)
        (target / name).write_text(json.dumps(values if eos is None else {**values, "eos_token_id": eos}))
    return target


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("family", "place"), [
    ("mamba", "generation_config.json"), ("falcon_mamba", "all"), ("jamba", "several"), ("mamba", "tokenizer"),
    ("jamba", "config.json"), ("jamba", "a list in config.json"),
])  # fmt: skip
def test_answers_end_where_those_of_transformers_do(
    family: str, place: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Fault: an answer that runs on behind the end of sequence, or stops before it: the ids of all files together end
    it, so transformers gets these, which takes those of the first file."""
    folder = tiny_checkpoint(family, tie_word_embeddings=False)
    whole = answer(folder, ignore_eos=True).token_ids
    end = next(token for token in dict.fromkeys(whole) if whole.index(token) >= 3)
    never = next(token for token in range(2, VOCAB) if token not in whole)
    eos: tuple[object, object, int | None] = {
        "generation_config.json": (None, end, None),
        "all": (whole[8], [never, whole[9]], end),
        "several": (None, [never, end, whole[-1]], None),
        "tokenizer": (never, None, end),
        "config.json": (end, None, None),
        "a list in config.json": ([end, whole[-1]], None, None),
    }[place]
    stopping = with_eos(folder, tmp_path / "model", *eos)
    if place in ("config.json", "a list in config.json"):
        (stopping / "generation_config.json").unlink()
    ends = [one for ids in eos if ids is not None for one in (ids if isinstance(ids, list) else [ids])]
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        [tokens] = load_oracle(stopping).generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS,
            pad_token_id=0, eos_token_id=ends,
        )  # fmt: skip
    expected = tokens[len(PROMPT) :].tolist()
    assert expected == whole[: len(expected)] and len(expected) < NEW_TOKENS, "the oracle did not stop"
    result = answer(stopping)
    assert (result.token_ids, result.finish_reason) == (expected, "stop")
    assert answer(stopping, ignore_eos=True).token_ids == whole


def test_the_last_token_may_be_the_end(tiny_checkpoint, tmp_path: Path) -> None:
    """Fault: `length` for an answer that ended by itself with its last token, or a token more than was asked for."""
    whole = answer(tiny_checkpoint("jamba"), ignore_eos=True).token_ids
    end = next(token for token in whole if whole.index(token) >= 2)
    at = whole.index(end)
    folder = with_eos(tiny_checkpoint("jamba"), tmp_path / "model", None, end)
    assert answer(folder, max_tokens=at + 1).finish_reason == "stop"
    assert answer(folder, max_tokens=at).finish_reason == "length"
    assert answer(folder, max_tokens=at + 1, ignore_eos=True).finish_reason == "length"


# Drawing


def cut(logits: torch.Tensor, temperature: float, top_p: float, top_k: int = 0, min_p: float = 0.0) -> np.ndarray:
    """The distribution that transformers' warpers give in the order of docs/sampling.md, in float64."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    row = TemperatureLogitsWarper(temperature)(None, logits.double().unsqueeze(0))
    row = TopKLogitsWarper(min(top_k, len(logits)))(None, row) if top_k else row
    row = MinPLogitsWarper(min_p)(None, row) if min_p else row
    row = TopPLogitsWarper(top_p)(None, row) if top_p < 1 else row
    return row.softmax(-1)[0].numpy()


def drawn(
    logits: torch.Tensor, temperature: float, top_p: float, count: int, top_k: int = 0, min_p: float = 0.0
) -> Counter[int]:
    """How often each token comes in draws of as many requests."""
    row = logits.numpy()
    keys = (request_key(Request(f"r{seed % 7}", (), seed=seed)) for seed in range(count))
    return Counter(draw(row, temperature, top_k, min_p, top_p, key, step=3)[0] for key in keys)


def assert_likely(frequencies: Counter[int], expected: np.ndarray, count: int) -> None:
    """Pearson's chi-square, rare tokens together, below what chance exceeds once in 10,000 times (Wilson and Hilferty
    1931). The seeds are fixed: a test passes or fails for good."""
    common = count * expected >= 5
    seen = np.array([frequencies[token] for token in range(len(expected))], np.float64)
    cells = [*zip(seen[common], count * expected[common], strict=True)]
    rest = (count - seen[common].sum(), count * expected[~common].sum())
    cells += [rest] if rest[1] >= 5 else []
    degrees = max(1, len(cells) - 1)
    spread = 2 / (9 * degrees)
    bound = degrees * (1 - spread + 3.719 * math.sqrt(spread)) ** 3
    statistic = sum((found - due) ** 2 / due for found, due in cells)
    assert statistic <= bound, f"chi-square {statistic:.1f} of {degrees} degrees; expected at most {bound:.1f}"


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("temperature", "top_k", "min_p", "top_p"), [
    (0.3, 0, 0.0, 1.0), (0.7, 0, 0.0, 0.1), (1.0, 0, 0.0, 0.95), (2.5, 0, 0.0, 0.6), (50.0, 0, 0.0, 1.0),
    (0.6, 5, 0.0, 1.0), (1.7, 1, 0.0, 1.0), (1.7, 0, 0.08, 1.0), (1.7, 9, 0.05, 0.8), (1.7, 6, 0.0, 0.7),
    (0.6, 0, 0.3, 0.9), (1.7, 500, 0.0, 0.95),
])  # fmt: skip
def test_tokens_come_as_often_as_transformers_says(temperature: float, top_k: int, min_p: float, top_p: float) -> None:
    """Fault: a temperature that multiplies, a cut that is ignored, comes in another order or keeps one token too many
    or too few, a draw that leans to one side."""
    logits = torch.randn(23, generator=torch.Generator().manual_seed(11)) * 2
    expected, count = cut(logits, temperature, top_p, top_k, min_p), max(3000, tries(6000))
    frequencies = drawn(logits, temperature, top_p, count, top_k, min_p)
    assert all(expected[token] > 0 for token in frequencies), "a token came that is cut away"
    assert_likely(frequencies, expected, count)


@table("temperature, top_k, min_p, top_p", [(0.7, 0, 0.0, 1.0), (1.7, 9, 0.05, 0.8), (2.5, 0, 0.0, 0.3)])
def test_processed_logprobs_are_of_what_was_drawn_from(
    temperature: float, top_k: int, min_p: float, top_p: float
) -> None:
    """Faults: log-probabilities before the temperature or a cut; a token listed that could not be drawn."""
    logits = torch.randn(23, generator=torch.Generator().manual_seed(11)) * 2
    expected = cut(logits, temperature, top_p, top_k, min_p)
    best = [int(token) for token in np.argsort(-expected, kind="stable")[:5] if expected[token] > 0]
    for step in range(20):
        token, (logprob, likely) = draw(logits.numpy(), temperature, top_k, min_p, top_p, 7, step, num_top=5)
        assert math.exp(logprob) == pytest.approx(expected[token], rel=1e-6)
        assert [one for one, _ in likely] == best
        assert all(math.exp(value) == pytest.approx(expected[one], rel=1e-6) for one, value in likely)


def kept_tokens(logits: Sequence[float], temperature: float, top_p: float) -> set[int]:
    return set(drawn(torch.tensor(logits), temperature, top_p, 400))


def test_top_p_keeps_what_transformers_keeps() -> None:
    """Fault: a cut by another rule than the fewest likeliest tokens that have the probability together; a tiny top_p
    that keeps nothing, 1.0 that drops something, a tie cut by anything but the lower id."""
    for top_p in (0.2, 0.5, 0.8, 0.9, 0.97):
        for seed in range(tries(10)):
            logits = torch.randn(9, generator=torch.Generator().manual_seed(int(100 * top_p) + seed))
            expected = cut(logits, 1.0, top_p)
            assert kept_tokens(logits.tolist(), 1.0, top_p) == {token for token in range(9) if expected[token] > 0}
    for logits, top_p, kept in (
        ([0.0, 1.0, 0.5], 5e-324, {1}), ([0.0, 1.0, 0.5], 1.0, {0, 1, 2}), ([0.0, 2.0, 2.0], 1e-9, {1}),
        ([1.0, 1.0, 1.0, 1.0], 0.5, {0, 1}), ([1.0, 1.0, 1.0, 1.0], 0.51, {0, 1, 2}),  # just the half, and more
    ):  # fmt: skip
        assert kept_tokens(logits, 1.0, top_p) == kept


@table("temperature, scale", [(5e-324, 1e-40), (5e-324, 1e38), (1e-307, 1.0), (1e-200, 1e38), (1e-100, 1e-30)])
def test_a_temperature_near_zero_is_greedy(temperature: float, scale: float) -> None:
    """Fault: logits divided by 1e-307 became infinite, their differences NaN, and any token an answer. All weight is
    on the largest logit; among equal ones it is shared."""
    smaller = torch.tensor(1.5 * scale).nextafter(torch.tensor(0.0)).item()
    for top_p in (1.0, 0.3):
        assert kept_tokens([-1.5 * scale, smaller, 1.5 * scale, smaller], temperature, top_p) == {2}
    tied = drawn(torch.tensor([0.5 * scale, 1.5 * scale, smaller, 1.5 * scale]), temperature, 1.0, 400)
    assert set(tied) == {1, 3} and 150 < tied[1] < 250


@pytest.mark.parametrize("temperature", [1e300, 1.7e308])
def test_a_huge_temperature_draws_among_all_alike(temperature: float) -> None:
    """Fault: a temperature beyond float32 that overflows instead of levelling the distribution."""
    frequencies = drawn(torch.tensor([-3e38, 0.0, 5.0, 3e38]), temperature, 1.0, 4000)
    assert all(880 < frequencies[token] < 1120 for token in range(4)), frequencies


def test_temperature_and_top_p_reach_the_engine(tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: a request's temperature or top_p stays behind: first tokens of many requests come as often as
    transformers says, from the model's own logits."""
    folder = tiny_checkpoint("falcon_mamba")
    oracle = load_oracle(folder)
    with torch.no_grad():
        logits = oracle(torch.tensor([PROMPT])).logits[0, -1]
    engine = Engine(folder, pool_size_bytes=16 << 20, block_size=5)
    count, temperature, top_p = max(800, tries(1500)), 2.0, 0.7
    requests = (
        Request(f"r{i}", PROMPT, max_tokens=1, temperature=temperature, top_p=top_p, seed=3) for i in range(count)
    )
    frequencies = Counter(result.token_ids[0] for result in engine.run(requests))
    expected = cut(logits, temperature, top_p)
    assert_likely(frequencies, expected, count)
    assert sum(frequencies[token] for token in range(VOCAB) if expected[token] == 0) <= 2  # at the very edge
    engine.close()


def test_a_logprob_is_the_models_own_whatever_the_temperature(tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: log-probabilities after temperature and top_p, or of another token than the one that was drawn."""
    folder = tiny_checkpoint("falcon_mamba")
    oracle = load_oracle(folder)
    result = answer(folder, max_tokens=12, temperature=3.0, top_p=0.9, seed=2, logprobs=True, ignore_eos=True)
    tokens = PROMPT + result.token_ids
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0, len(PROMPT) - 1 : -1].double().log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(result.token_ids).unsqueeze(1)).squeeze(1)
    assert torch.allclose(torch.tensor(result.logprobs).double(), chosen, atol=2e-4)
    for changed in ({"temperature": 3.0}, {"temperature": 0.0}, {"temperature": 0.0, "presence_penalty": 2.0}):
        given = dict(max_tokens=6, top_p=0.9, seed=2, logprobs=True, top_logprobs=3, ignore_eos=True) | changed
        raw, processed = answer(folder, **given), answer(folder, **given, processed_logprobs=True)
        assert raw.token_ids == processed.token_ids and raw.top_logprobs and processed.top_logprobs
        assert (raw.logprobs == processed.logprobs) == (changed == {"temperature": 0.0})
        for token, logprob, likely in zip(processed.token_ids, processed.logprobs, processed.top_logprobs, strict=True):
            assert (token, logprob) in likely or logprob <= likely[-1][1]
