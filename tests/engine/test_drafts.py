"""Answers with drafts are the bits of answers without: right drafts and wrong ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from apcbatch import Engine, Request
from apcbatch.engine.drafting import MOST_DRAFTED
from apcbatch.model.causal_lm import CausalLM
from tests.effort import tries
from tests.engine.runs import by_id, tokens, told
from tests.engine.scripted_drafts import Script, drafting
from tests.engine.test_cuda_engine import MODELS
from tests.tiny import FAMILIES, VOCAB


def oracle(answers: Mapping[tuple[int, ...], Sequence[Sequence[int]]], right: float) -> Script:
    """Draft the known answer of a prompt, with random faults. right: probability that a token stays as it is."""

    def draft(prompt: list[int], done: list[int]) -> Sequence[int]:
        known = [one for one in answers[tuple(prompt)] if list(one[: len(done)]) == done]
        assert known, "the answer differs from that without drafts"
        rest = random.choice(known)[len(done) :][: random.randint(1, MOST_DRAFTED)]
        drafted = [one if random.random() < right else random.randrange(VOCAB) for one in rest]
        return drafted + [random.randrange(VOCAB)] * random.randint(0, 2)  # past the end too

    return draft


def check_a_draw(folder: Path, runs_ahead: bool = False, **fixed: object) -> None:
    """Compare a random run with drafts to one without: answers, snapshots, passes. runs_ahead: passes begin before the
    one before them is read, as on a device."""
    prefix = tokens(random.randint(1, 90), random.getrandbits(30))
    requests = []
    for number in range(random.randint(1, 12)):
        settings = random.choice(
            [
                {},
                {"temperature": 0.8},
                {"temperature": 1.5, "n": 3, "top_p": 0.9},
                {"repetition_penalty": 1.3, "presence_penalty": 0.5},
                {"top_logprobs": 3, "logprobs": True},
                {"min_tokens": 5, "stop_token_ids": [random.randrange(VOCAB) for _ in range(8)]},
                {"allowed_token_ids": tokens(5, number), "temperature": 1.0},
                {"logit_bias": {3: 5.0}, "frequency_penalty": 0.3},
                {"score_from": 1, "score_top": 2},
                {"keep_answer": False},
            ]
        )
        prompt = prefix[: random.randint(1, len(prefix))] + tokens(random.randint(1, 60), random.getrandbits(30))
        base = {"logprobs": random.random() < 0.5, "ignore_eos": random.random() < 0.5}
        requests.append(Request(str(number), prompt, max_tokens=random.randint(1, 40), **{**base, **settings}))
    options = dict(
        block_size=random.choice([1, 3, 16, 64]),
        policy=random.choice(["all", "last", "planned", "none"]),
        max_running=random.choice([1, 2, 5, 32]),
        max_batch_tokens=random.choice([1, 33, 2048]),
        dtype=random.choice(["float32", "bfloat16"]),
        **fixed,
    )
    plain = Engine(folder, draft=(), **options)
    expected = by_id(plain.run(requests))
    right = random.choice([0.0, 0.5, 0.9, 1.0])
    answers: dict[tuple[int, ...], list[list[int]]] = {}
    for one in requests:
        own = [answer.token_ids for answer in expected[one.id].answers]
        answers.setdefault(tuple(one.token_ids), []).extend(own)
    engine = drafting(folder, oracle(answers, right), runs_ahead=runs_ahead or None, **options)
    found = by_id(engine.run(requests))
    for one in requests:
        assert told(found[one.id]) == told(expected[one.id]), (one, options)
        whole = [*one.token_ids, *expected[one.id].token_ids]
        held = plain.boundaries(whole)
        assert engine.boundaries(whole) == held, (one, options)
        for position in random.sample(held, min(3, len(held))):
            ours, theirs = engine.snapshot(whole[:position]), plain.snapshot(whole[:position])
            assert all(ours[name].equal(theirs[name]) for name in theirs), (position, options)
    assert engine.counters.decode_tokens == plain.counters.decode_tokens
    saved = plain.counters.decode_chunks - engine.counters.decode_chunks
    assert saved == sum(accepted for _, accepted in engine.counters.drafts.values())
    plain.close()
    engine.close()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_bit(family: str, way: str, tiny_checkpoint) -> None:
    """Catches a draft that reaches the answer: a row computed otherwise, a state that runs ahead, a setting that sees
    rejected tokens, a snapshot of a rejected position."""
    folder = tiny_checkpoint(family, tie_word_embeddings=False)  # tied, mamba repeats one token for ever
    for _ in range(tries(30)):
        check_a_draw(folder)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("family", "num_stages"), [("mamba", 1), ("mamba", 2), ("jamba", 1), ("jamba", 3), ("qwen3_5", 1)]
)
def test_drafts_change_no_bit_with_passes_in_flight(
    family: str, num_stages: int, tiny_checkpoint, stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a draft whose tokens, states or slots another pass in flight takes, as on a device or on several."""
    monkeypatch.setattr(CausalLM, "replays", False)
    monkeypatch.setattr("apcbatch.engine.parts.writes_draft_states", lambda device: True)
    if num_stages > 1:
        stages(num_stages)
    folder = tiny_checkpoint(family, tie_word_embeddings=False)
    for _ in range(tries(30)):
        check_a_draw(folder, runs_ahead=random.random() < 0.7)


@pytest.mark.cuda
@pytest.mark.parametrize("model", MODELS)
def test_drafts_change_no_bit_on_a_device(model: str, tiny_checkpoint) -> None:
    """Catches the same on a device, where passes without drafts are graphs that run ahead of the host."""
    family, sizes = MODELS[model]
    folder = tiny_checkpoint(family, **sizes)
    for _ in range(tries(30)):
        check_a_draw(folder, device="cuda", pool_size_bytes=256 << 20)
