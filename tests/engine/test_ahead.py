"""Passes that are begun before the tokens of the one before are read: on the CPU, which gains nothing from it, they
give what passes one after the other give."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from apcbatch import Engine, Request, Result
from apcbatch.engine import step
from tests.engine import runs
from tests.engine.opened import OpenedEngine
from tests.engine.runs import ending, told
from tests.tiny import VOCAB


def draws(seed: int) -> list[Request]:
    """Requests of every kind that ends or draws its tokens in its own way."""
    source = random.Random(seed)
    return [
        Request(
            str(number), [source.randrange(1, VOCAB) for _ in range(source.randrange(1, 70))],
            max_tokens=source.randrange(1, 90), ignore_eos=number % 3 == 0, logprobs=number % 2 == 0,
            temperature=1.0 if number % 8 == 5 else 0.0,
        )
        for number in range(12)
    ]  # fmt: skip


def serve(folder: Path, requests: list[Request], ahead: bool, **options: object) -> tuple[dict[str, Result], Engine]:
    """The results by id, and the engine, closed."""
    options = {"pool_size_bytes": 8 << 20, "block_size": 16, "draft": (), **options}
    engine = OpenedEngine(folder, runs_ahead=ahead, **options)
    return runs.serve(engine, requests), engine


def outcomes(results: dict[str, Result]) -> dict[str, object]:
    return {key: (told(result), result.cached_tokens) for key, result in results.items()}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each pass: how many chunks it has, and whether it was begun ahead."""
    noted, run_pass = [], step.run_pass

    def note(model: object, decodes: object, chunks: list[step.Chunk], before: step.Pass | None = None) -> torch.Tensor:
        noted.append((len(chunks), before is not None))
        return run_pass(model, decodes, chunks, before)

    monkeypatch.setattr(step, "run_pass", note)
    return noted


@pytest.mark.parametrize(("family", "options"), [
    ("mamba", {"policy": "none"}), ("jamba", {"policy": "none", "max_running": 3}),
    ("jamba", {"policy": "last", "max_running": 4}), ("mamba", {"policy": "all", "max_batch_tokens": 40}),
])  # fmt: skip
def test_answers_are_the_same(
    family: str, options: dict[str, object], tiny_checkpoint: Callable[..., Path], tmp_path: Path, passes: list
) -> None:
    """Catches a token of another sequence or of another pass, an answer that continues after its end or loses its last
    token, and a state that one token too many was added to and that is read."""
    seed = random.randrange(1 << 30)
    folder = ending(tiny_checkpoint(family, tie_word_embeddings=False), tmp_path / "model", list(range(3, VOCAB, 8)))
    expected, _ = serve(folder, draws(seed), False, **options)
    assert not any(ahead for _, ahead in passes)
    results, _ = serve(folder, draws(seed), True, **options)
    assert any(ahead for _, ahead in passes)
    assert outcomes(results) == outcomes(expected), f"seed {seed}"
    assert {result.finish_reason for result in results.values()} == {"stop", "length"}, f"seed {seed}"


def test_only_an_unforeseen_end_costs_a_token(tiny_checkpoint: Callable[..., Path], passes: list) -> None:
    """Catches passes that are not begun ahead where they could be, and those that compute tokens beyond a limit that
    is known: sequences that end by their limits alone take as many passes, of as many tokens."""
    requests = [Request(str(n), [n + 1] * 9, max_tokens=10 + 3 * n, ignore_eos=True) for n in range(5)]
    folder = tiny_checkpoint("mamba")
    _, before = serve(folder, requests, False, policy="none")
    counts = [count for count, _ in passes]
    passes.clear()
    _, after = serve(folder, requests, True, policy="none")
    assert [count for count, _ in passes] == counts
    assert [ahead for _, ahead in passes] == [False, False] + [True] * (len(counts) - 2)
    assert after.counters.unique_tokens == before.counters.unique_tokens


def test_numbers_that_become_infinite_end_one_answer(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, passes: list
) -> None:
    """Catches a row without a token that is looked up in the embedding by the pass that was begun, an answer that it
    becomes, and batch mates that lose theirs."""
    folder, prompts = tiny_checkpoint("falcon_mamba"), [[n + 1, 2 * n + 3, 5] * 4 for n in range(4)]
    requests = [Request(str(n), prompt, max_tokens=24, ignore_eos=True) for n, prompt in enumerate(prompts)]
    whole, _ = serve(folder, requests, False, policy="none")
    met = whole["1"].token_ids[4]
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    weights = load_file(broken / "model.safetensors")
    weights["backbone.embeddings.weight"][met] = math.inf
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    expected, _ = serve(broken, requests, False, policy="none")
    passes.clear()
    results, _ = serve(broken, requests, True, policy="none")
    assert any(ahead for _, ahead in passes)
    assert results["1"].error is not None and results["1"].error.code == "non_finite"
    assert outcomes(results) == outcomes(expected)
