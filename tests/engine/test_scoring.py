"""What an engine says of a prompt's tokens: against transformers, to the bit with any passes, and in little memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apcbatch import Engine, Request
from apcbatch.engine import scoring, step
from apcbatch.engine.scoring import score_rows
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.model.causal_lm import CausalLM
from tests.effort import table, tries
from tests.engine.opened import OpenedEngine
from tests.engine.runs import by_id, serve, tokens
from tests.engine.test_given_back import Books
from tests.tiny import FAMILIES, VOCAB

ROOMY = 16 << 20


def scored(seed: int, count: int = 7) -> list[Request]:
    """Prompts of one prefix, scored from anywhere, most with new tokens and alternatives, some with plain requests."""
    rng = random.Random(seed)
    prefix = tokens(120, seed)
    requests = []
    for number in range(count):
        prompt = prefix[: rng.randrange(1, 120)] + tokens(rng.randrange(0, 50), seed + number)
        score_from = rng.choice([None, 1, len(prompt), rng.randrange(1, len(prompt) + 1)])
        least = score_from is None
        requests.append(
            Request(
                str(number), prompt, max_tokens=rng.randrange(least, 4), ignore_eos=True, logprobs=True,
                score_from=score_from, score_top=0 if score_from is None else rng.randrange(0, 5),
                temperature=rng.choice([0.0, 1.0]), n=rng.randrange(1, 4),
            )
        )  # fmt: skip
    return requests


@pytest.mark.drawn(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_transformers(
    family: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the log-probability of a neighbour's row or token: each one against a full forward of the outside oracle,
    and ranks and alternatives against its sorted row. In float32 the oracle's delta nets are off by 4e-4."""
    from tests.model.parity import in_float64, oracle_of

    folder = tiny_checkpoint(family)
    oracle = oracle_of(folder)
    engine = Engine(folder, block_size=16, max_batch_tokens=33, max_running=3, pool_size_bytes=ROOMY)
    requests = [
        Request(str(k), tokens(length, k), max_tokens=0, score_from=begin, score_top=4)
        for k, (length, begin) in enumerate([(75, 1), (130, 90), (64, 64), (65, 64), (2, 1), (1, 1)])
    ]
    for request in requests:
        with in_float64(monkeypatch):
            rows = oracle(torch.tensor([request.token_ids])).logits[0].log_softmax(-1)
        (result,) = engine.run([request])
        scores = result.scores
        assert result.error is None and scores is not None and result.token_ids == []
        assert (scores.begin, result.finish_reason) == (request.score_from, "length")
        positions = range(request.score_from, len(request.token_ids))
        assert len(scores.logprobs) == len(scores.ranks) == len(scores.top) == len(positions)
        for position, logprob, rank, top in zip(positions, scores.logprobs, scores.ranks, scores.top, strict=True):
            row, token = rows[position - 1], request.token_ids[position]
            assert logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert rank == 1 + int((row > row[token]).sum())
            best = row.topk(4)
            assert [one for one, _ in top] == best.indices.tolist()
            assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-4)
    engine.close()


@pytest.mark.drawn(1)
@pytest.mark.slow
def test_the_same_bits_however_they_are_computed(folder: Path) -> None:
    """Catches scores that depend on where a prompt is cut, on what it resumed from, on batch mates, or on the slices
    that logits are made in; and an answer that scoring changes."""
    for seed in (11, *random.sample(range(1 << 30), tries(10))):  # 11: several answers of no token
        requests = scored(seed)
        plain = [replace(one, score_from=None, score_top=0, max_tokens=max(1, one.max_tokens)) for one in requests]
        cold = Engine(folder, policy="none", max_running=1, pool_size_bytes=ROOMY)
        expected, unscored = by_id(cold.run(requests)), serve(cold, plain)
        for policy, size in (("all", 5), ("last", 64), ("planned", 2048), ("all", 64), ("none", 64)):
            engine = OpenedEngine(
                folder, block_size=8, policy=policy, max_batch_tokens=size, max_running=4, pool_size_bytes=ROOMY,
                runs_ahead=size == 64,
            )  # fmt: skip
            books, where = Books(engine), f"seed {seed}, {policy}, {size}"
            for _ in range(2):
                found = by_id(engine.run(requests))
                for request in requests:
                    one, other = found[request.id], expected[request.id]
                    assert one.error is None and one.scores == other.scores, where
                    assert [a.token_ids for a in one.answers] == [a.token_ids for a in other.answers], where
                    if request.max_tokens:
                        alone = unscored[request.id]
                        assert (one.token_ids, one.logprobs) == (alone.token_ids, alone.logprobs), where
                    assert one.cached_tokens + one.computed_tokens == len(request.token_ids)
                    assert one.cached_tokens <= request.resumable
                books.balance()
            engine.close()


def test_what_was_generated_is_scored_alike(tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a score that is not the log-probability with which the token was generated: the same bits, and greedy
    tokens have the first rank."""
    engine = Engine(tiny_checkpoint("jamba"), block_size=16, policy="all", pool_size_bytes=ROOMY)
    prompt = tokens(90, 1)
    for temperature in (0.0, 1.0):
        request = Request("a", prompt, max_tokens=40, logprobs=True, ignore_eos=True, temperature=temperature)
        (made,) = engine.run([request])
        (found,) = engine.run([Request("b", prompt + made.token_ids, max_tokens=0, score_from=90)])
        assert found.scores is not None and found.scores.logprobs == made.logprobs
        assert (set(found.scores.ranks) == {1}) is (temperature == 0)
        assert found.cached_tokens == 80  # the last boundary before what is scored, though 128 is held
    engine.close()


@table("slice_bytes", [1, 3 * 4 * VOCAB, 1 << 30])
def test_slices_change_nothing(
    slice_bytes: int, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a row that is left out or scored twice between two slices, and logits beyond the bound."""
    engine = Engine(tiny_checkpoint("mamba"), policy="none", pool_size_bytes=ROOMY)
    request = Request("a", tokens(50, 1), max_tokens=0, score_from=4, score_top=2)
    (expected,) = engine.run([request])
    head, sizes = CausalLM.head, []

    def noted(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = head(model, hidden)
        sizes.append(len(logits))
        return logits

    monkeypatch.setattr(CausalLM, "head", noted)
    monkeypatch.setattr(scoring, "SLICE_BYTES", slice_bytes)
    (found,) = engine.run([request])
    assert found.scores == expected.scores and sum(sizes) == 46
    assert max(sizes) <= max(1, slice_bytes // (4 * VOCAB))
    engine.close()


class _Rows:
    """A model whose hidden states are its logits."""

    backend = CpuBackend()

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        return normed


def test_ties_go_to_the_lower_id() -> None:
    """Catches a rank of 1 for a token that greedy generation does not take, and alternatives in any order."""
    rows = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0, 1.0]] * 6)
    scores = score_rows(_Rows(), rows, np.arange(6, dtype=np.int32), 1, 4)
    assert scores is not None and scores.ranks == [4, 1, 2, 3, 6, 5]
    assert [[token for token, _ in top] for top in scores.top] == [[1, 2, 3, 0]] * 6
    assert scores.logprobs[1] == scores.top[0][0][1] == scores.top[0][2][1]
    few = score_rows(_Rows(), rows[:1], np.zeros(1, np.int32), 1, 20)
    assert few is not None and [token for token, _ in few.top[0]] == [1, 2, 3, 0, 5, 4]


@table("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_have_no_scores(bad: float) -> None:
    """Catches numbers made of NaN."""
    rows = torch.zeros(5, 7)
    rows[3, 2] = bad
    assert score_rows(_Rows(), rows, np.zeros(5, np.int32), 1, 0) is None
    assert score_rows(_Rows(), rows[:3], np.zeros(3, np.int32), 1, 0) is not None


def test_a_prompt_that_breaks_fails_alone(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches scores of a broken prompt that are given, and other requests that fail with it."""
    engine = OpenedEngine(tiny_checkpoint("jamba"), block_size=16, max_batch_tokens=40, pool_size_bytes=ROOMY)
    books, run_pass = Books(engine), step.run_pass

    def breaks(model: Any, decodes: Any, chunks: list[step.Chunk], before: Any = None) -> Any:
        logits, hidden, choice = run_pass(model, decodes, chunks, before)
        first = 0
        for chunk in chunks:
            if chunk.sequence.request.id == "bad" and chunk.end > 60 and chunk.scored:
                hidden = hidden.clone()
                hidden[first] = float("nan")
            first += len(chunk.scored)
        return logits, hidden, choice

    requests = [Request(name, tokens(90, k), max_tokens=0, score_from=1) for k, name in enumerate(["a", "bad", "b"])]
    expected = by_id(engine.run([replace(one, token_ids=list(one.token_ids)) for one in requests]))
    monkeypatch.setattr(step, "run_pass", breaks)
    found = by_id(engine.run(requests))
    assert found["bad"].error is not None and found["bad"].error.code == "non_finite"
    assert [found[name].scores for name in "ab"] == [expected[name].scores for name in "ab"]
    books.balance()
    engine.close()
