"""A checkpoint's logits against those that transformers computes in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from apcbatch import Engine, Request
from tests.engine.opened import OpenedEngine
from tests.tiny import VOCAB

LENGTHS = [1, 2, 63, 64, 65, 300]  # of prompts


@cache
def oracle_of(folder: Path) -> Any:
    """The model that transformers makes of a checkpoint, in float64, as are its wavelengths of rotary positions, kept
    for the session. Nemotron-H limits its steps by time_step_limit in prefill too, instead of by time_step_min."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    oracle, config = oracle.eval().double(), oracle.config
    if config.model_type == "nemotron_h":
        for layer in oracle.model.layers:
            layer.mixer.time_step_limit = tuple(config.time_step_limit)
    if getattr(oracle.base_model, "rotary_emb", None) is None:
        return oracle
    table = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    columns = int(head_dim * table.get("partial_rotary_factor", 1))
    oracle.base_model.rotary_emb.inv_freq = table["rope_theta"] ** (-torch.arange(0, columns, 2).double() / columns)
    return oracle


def watched(engine: OpenedEngine) -> list[torch.Tensor]:
    """The logits of each pass from now on."""
    seen: list[torch.Tensor] = []
    model = engine.parts.model

    def kept(run: Callable[..., Any], *arguments: Any) -> Any:
        found = run(*arguments)
        seen.append((found if isinstance(found, torch.Tensor) else found.logits).clone())
        return found

    for name in ("passed", "_forward"):
        run = getattr(model, name)
        setattr(model, name, lambda *arguments, run=run: kept(run, *arguments))
    return seen


@contextmanager
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code of transformers that asks for float32 gets float64: in float32 its own rounding errors reach 1.5e-5 of the
    largest value."""
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        yield


def answers(folder: Path, **options: Any) -> tuple[str, list[Any]]:
    """The fingerprint of a checkpoint, and its answers to one prompt twice, the second from a snapshot: tokens, their
    log-probabilities, number of cached tokens."""
    engine = Engine(folder, pool_size_bytes=1 << 20, block_size=4, **options)
    prompt = list(range(1, 30))
    results = [one for _ in range(2) for one in engine.run([Request("r", prompt, max_tokens=6, logprobs=True)])]
    engine.close()
    assert results[1].cached_tokens > 0
    return engine.fingerprint, [(one.token_ids, one.logprobs, one.cached_tokens) for one in results]


def assert_equals_oracle(folder: Path, length: int, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a prompt of this length, cut anywhere, alone or packed behind another one, and of 50 tokens after
    it are within the tolerance of those of transformers in float64, relative to the largest of them, and each token is
    the likeliest by those."""
    prompt = torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    budget, in_front = random.randint(1, max(2, length)), random.randint(0, 1)
    requests = [Request("front", random.choices(range(1, VOCAB), k=13), max_tokens=1)] * in_front
    most = budget + 13 * in_front
    engine = OpenedEngine(folder, pool_size_bytes=16 << 20, max_batch_tokens=most, block_size=5, draft=())
    logits = watched(engine)
    *_, result = engine.run([*requests, Request("r", prompt, max_tokens=50, ignore_eos=True)])
    engine.close()
    assert result.error is None and (result.id, len(result.token_ids)) == ("r", 50)
    oracle = oracle_of(folder)
    with in_float64(monkeypatch):
        expected = oracle(torch.tensor([prompt + result.token_ids[:-1]]), use_cache=False).logits[0, length - 1 :]
    assert expected.dtype == torch.float64
    found = torch.cat(logits)
    assert len(found) == 50 + in_front
    error = (found[-50:] - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"
    assert result.token_ids == expected.argmax(1).tolist()
