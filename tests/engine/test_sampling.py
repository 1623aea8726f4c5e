"""The settings of sampling against the processors of `transformers`, and the same bits however a request is run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apcbatch import Engine, Request, Result
from apcbatch.engine.sampler import LogitsProcessors, draw, top_logprobs
from apcbatch.errors import RequestError
from tests.effort import tries
from tests.engine import runs
from tests.engine.opened import OpenedEngine
from tests.engine.runs import told
from tests.tiny import VOCAB, load_oracle

PROMPT = torch.randint(1, VOCAB, (21,), generator=torch.Generator().manual_seed(5)).tolist()


class Penalties:
    """presence_penalty and frequency_penalty as OpenAI's API defines them, which `transformers` does not have."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token, count in Counter(input_ids[0, self._num_prompt :].tolist()).items():
            scores[0, token] = scores[0, token] - self._frequency * count - self._presence
        return scores


class Only:
    """The only tokens that may come."""

    def __init__(self, allowed: list[int]) -> None:
        self._allowed = allowed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self._allowed] = scores[:, self._allowed]
        return kept


def processors(settings: dict[str, Any], num_prompt: int, ends: list[int]) -> Any:
    """What changes logits, in the order of docs/sampling.md, by transformers' own processors where it has them."""
    from transformers import (
        LogitsProcessorList,
        MinNewTokensLengthLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    bias = settings.get("logit_bias")
    return LogitsProcessorList([
        *([SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])] if bias else []),
        *([RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"])]
          if "repetition_penalty" in settings else []),
        Penalties(num_prompt, settings.get("presence_penalty", 0.0), settings.get("frequency_penalty", 0.0)),
        *([MinNewTokensLengthLogitsProcessor(num_prompt, settings["min_tokens"], ends)]
          if "min_tokens" in settings else []),
        *([Only(settings["allowed_token_ids"])] if "allowed_token_ids" in settings else []),
    ])  # fmt: skip


def some(source: random.Random, ids: range = range(VOCAB)) -> dict[str, Any]:
    """A random half of the settings that change logits."""
    every: dict[str, Any] = {
        "logit_bias": {token: source.uniform(-4, 4) for token in source.sample(ids, 9)},
        "repetition_penalty": source.choice([0.7, 1.1, 1.8]),
        "presence_penalty": source.uniform(-2, 2),
        "frequency_penalty": source.uniform(-2, 2),
        "min_tokens": source.randrange(1, 12),
        "allowed_token_ids": source.sample(ids, len(ids) // 2),
    }
    return {name: value for name, value in every.items() if source.random() < 0.5}


def serve(folder: Path, requests: list[Request], **options: Any) -> dict[str, Result]:
    """The results by id, of an engine of its own."""
    return runs.serve(Engine(folder, **{"pool_size_bytes": 16 << 20, "block_size": 5, **options}), requests)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_greedy_answers_are_those_of_transformers(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: a penalty over other tokens than it should see, a bias or a mask that comes too late or not at all, an
    answer that ends before min_tokens or at another token. Token by token, for random settings."""
    folder = tiny_checkpoint(family, tie_word_embeddings=False)
    oracle = load_oracle(folder)
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
    prompt = torch.tensor([PROMPT])
    for number in range(tries(40)):
        settings = some(source)
        ends = source.sample(range(VOCAB), 12)
        with torch.no_grad():
            expected = oracle.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=30, pad_token_id=0,
                eos_token_id=ends, logits_processor=processors(settings, len(PROMPT), ends),
            )[0, len(PROMPT) :].tolist()  # fmt: skip
        request = Request(str(number), PROMPT, max_tokens=30, stop_token_ids=ends, ignore_eos=True, **settings)
        (result,) = serve(folder, [request]).values()
        told = f"seed {seed}, {settings}"
        assert result.error is None and result.token_ids == expected, told
        ended = expected[-1] in ends
        assert (result.finish_reason, result.stop_reason) == (("stop", expected[-1]) if ended else ("length", None)), (
            told
        )


def test_a_row_becomes_what_transformers_makes_of_it() -> None:
    """Fault: another formula or another order: the bits of each logit, with settings beside each other."""
    source = random.Random(seed := random.randrange(1 << 30))
    for _ in range(tries(200)):
        settings = some(source) | {"min_tokens": 9}
        prompt, answer = source.choices(range(VOCAB), k=30), source.choices(range(VOCAB), k=source.randrange(15))
        ends = [0, source.randrange(1, VOCAB - 1), VOCAB - 1]
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(source.randrange(1 << 30))) * 3
        request = Request("r", prompt, max_tokens=99, **settings)
        own = LogitsProcessors(request, np.array(prompt, np.int32), VOCAB, [*ends, -1, VOCAB])
        for token in answer:
            own.accept(token)
        row = logits.numpy().copy()
        own.apply(row, len(answer))
        expected = processors(settings, len(prompt), ends)(torch.tensor([[*prompt, *answer]]), logits[None].clone())
        assert np.allclose(row, expected[0].numpy(), rtol=3e-7, atol=3e-7), (seed, settings)
        assert ((row == -np.inf) == (expected[0].numpy() == -np.inf)).all()


def test_of_equal_logits_the_lowest_ids_stay() -> None:
    """Fault: top_k that keeps more than k tokens, or others than the first ones of a tie; a token of -infinity."""
    row = np.array([1, 3, 2, 2, 2, -np.inf], np.float32)
    for top_k, kept in ((1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (5, {0, 1, 2, 3, 4}), (6, {0, 1, 2, 3, 4})):
        assert {draw(row, 1.0, top_k, 0.0, 1.0, key, 0)[0] for key in range(300)} == kept
    alone = np.array([-np.inf, -np.inf, 4], np.float32)
    assert {draw(alone, 50.0, 0, 0.0, 1.0, key, 0)[0] for key in range(50)} == {2}


def test_the_likeliest_tokens_have_the_log_probabilities_of_transformers(tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: those after settings changed the logits, of another position, or in another order; the chosen token's own
    that differs from its entry."""
    folder = tiny_checkpoint("falcon_mamba")
    oracle = load_oracle(folder)
    settings = {"temperature": 1.4, "repetition_penalty": 1.5, "logit_bias": {7: 3.0}, "top_k": 30, "ignore_eos": True}
    for more in ({}, settings):
        request = Request("r", PROMPT, max_tokens=12, logprobs=True, top_logprobs=4, **more)
        (result,) = serve(folder, [request]).values()
        tokens = PROMPT + result.token_ids
        with torch.no_grad():
            rows = oracle(torch.tensor([tokens])).logits[0, len(PROMPT) - 1 : -1].double().log_softmax(-1)
        for row, token, logprob, top in zip(rows, result.token_ids, result.logprobs, result.top_logprobs, strict=True):
            expected = row.topk(4)
            assert [one for one, _ in top] == expected.indices.tolist()
            assert torch.allclose(torch.tensor([value for _, value in top]).double(), expected.values, atol=2e-4)
            assert abs(logprob - float(row[token])) < 2e-4 and dict(top).get(token, logprob) == logprob


def test_top_logprobs_of_a_tie_and_of_a_small_vocabulary() -> None:
    """Fault: more entries than tokens, a tie in the order of the sort."""
    row = np.array([0, 1, 1, 0, 1], np.float32)
    assert [token for token, _ in top_logprobs(row, 2)] == [1, 2]
    assert [token for token, _ in top_logprobs(row, 20)] == [1, 2, 4, 0, 3]
    assert abs(sum(np.exp(value) for _, value in top_logprobs(row, 20)) - 1) < 1e-6


class Even:
    """Every other token, three of them, each one after the last: a grammar of its own."""

    def __init__(self) -> None:
        self._next, self._count = 0, 0

    def fill(self, mask: np.ndarray) -> bool:
        mask[:] = 0
        for token in range(self._next, VOCAB, 2):
            mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        return True

    def accept(self, token: int) -> bool:
        self._next, self._count = (token + 2) % VOCAB, self._count + 1
        return self._count == 3


class After:
    """Ends the answer with the second token of a kind that may end it."""

    def __init__(self) -> None:
        self._count = 0

    def accept(self, token: int, may_end: bool) -> str | None:
        self._count += may_end and token % 3 == 0
        return "twice" if self._count == 2 else None


EACH: list[dict[str, Any]] = [
    {"top_k": 7, "temperature": 0.9}, {"min_p": 0.1, "temperature": 1.3}, {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8}, {"repetition_penalty": 1.4}, {"logit_bias": {3: 5.0, 9: -100.0}},
    {"allowed_token_ids": list(range(0, VOCAB, 3))}, {"min_tokens": 9}, {"stop_token_ids": list(range(0, VOCAB, 5))},
    {"logprobs": True, "top_logprobs": 5}, {"constraint": Even}, {"constraint": Even, "temperature": 1.0},
    {"ending": After}, {"ending": After, "min_tokens": 6}, {},
    {"temperature": 1.1, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.5,
     "logit_bias": {5: 2.0}, "min_tokens": 4, "ending": After, "logprobs": True, "top_logprobs": 2},
]  # fmt: skip


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_each_setting_has_the_same_bits_however_it_is_run(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: what one request is given reaches its batch mates, a constraint or a penalty continues from another
    answer, a draw depends on the order, on where a prefix came from, or on what was begun ahead."""
    folder = tiny_checkpoint(family, tie_word_embeddings=False)
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
    requests = [
        Request(
            f"{number}", PROMPT[: source.randrange(6, 21)] + source.choices(range(1, VOCAB), k=source.randrange(9)),
            max_tokens=14, seed=number, ignore_eos=True, **settings,
        )
        for number, settings in enumerate(EACH)
    ]  # fmt: skip
    cold = Engine(folder, policy="none", pool_size_bytes=16 << 20)
    expected = {request.id: told(*cold.run([request])) for request in requests}
    cold.close()
    for options in ({"policy": "none"}, {"max_running": 3}, {"policy": "all", "max_batch_tokens": 8}):
        source.shuffle(requests)
        engine = OpenedEngine(folder, pool_size_bytes=16 << 20, block_size=5, **options)
        for ahead in (False, True):
            engine.pipeline.runs_ahead = ahead
            for result in engine.run(requests):
                assert result.error is None
                assert told(result) == expected[result.id], f"seed {seed}, {EACH[int(result.id)]}, {options}, {ahead}"
        engine.close()


def test_a_constraint_and_an_ending_end_their_answers(tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: a mask read from the wrong bit, an answer that continues when its form is complete or ends early."""
    folder = tiny_checkpoint("mamba")
    results = serve(folder, [
        Request("form", PROMPT, constraint=Even, ignore_eos=True),
        Request("text", PROMPT, ending=After, ignore_eos=True),
        Request("late", PROMPT, ending=After, min_tokens=9, max_tokens=40, ignore_eos=True),
    ])  # fmt: skip
    form = results["form"].token_ids
    assert len(form) == 3 and all(token % 2 == 0 for token in form) and results["form"].finish_reason == "stop"
    thirds = [place for place, token in enumerate(results["text"].token_ids) if token % 3 == 0]
    if results["text"].finish_reason == "stop":
        assert len(thirds) == 2 and thirds[-1] == len(results["text"].token_ids) - 1
        assert results["text"].stop_reason == "twice"
    if results["late"].finish_reason == "stop":
        late = [place for place, token in enumerate(results["late"].token_ids) if token % 3 == 0 and place >= 9]
        assert len(late) == 2 and late[-1] == len(results["late"].token_ids) - 1


def test_what_leaves_no_token_fails_alone(tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: a request whose settings forbid every token answers with a forbidden one, or takes its batch mates with
    it; one whose constraint raises ends the pass of all."""

    class Raises(Even):
        def fill(self, mask: np.ndarray) -> bool:
            raise RequestError("invalid_request", "no such form")

    class Breaks(Even):
        def accept(self, token: int) -> bool:
            raise KeyError("broken")

    folder = tiny_checkpoint("mamba")
    nothing = {"allowed_token_ids": [7], "logit_bias": {7: -np.inf}}
    requests = [
        Request("none", PROMPT, **nothing), Request("drawn", PROMPT, temperature=1.0, **nothing),
        Request("raises", PROMPT, constraint=Raises), Request("breaks", PROMPT, constraint=Breaks),
        Request("a", PROMPT),
    ]  # fmt: skip
    results = serve(folder, requests)
    codes = {key: result.error and result.error.code for key, result in results.items()}
    invalid = "invalid_request"
    assert codes == {"none": invalid, "drawn": invalid, "raises": invalid, "breaks": "internal", "a": None}
    assert "no token may come after 0 tokens of the answer" in str(results["none"].error)
    assert told(results["a"]) == told(serve(folder, [Request("a", PROMPT)])["a"])
