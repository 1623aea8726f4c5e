"""A checkpoint's logits against those that transformers computes in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from apcbatch import Engine, Request
from tests.tiny import VOCAB

LENGTHS = [1, 2, 63, 64, 65, 300]  # of prompts


def oracle_of(folder: Path) -> Any:
    """The model that transformers makes of a checkpoint, in float64, as are its wavelengths of rotary positions."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    oracle, config = oracle.eval().double(), oracle.config
    if not hasattr(oracle.model, "rotary_emb"):
        return oracle
    table = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    columns = int(head_dim * table.get("partial_rotary_factor", 1))
    oracle.model.rotary_emb.inv_freq = table["rope_theta"] ** (-torch.arange(0, columns, 2).double() / columns)
    return oracle


def watched(engine: Engine) -> list[torch.Tensor]:
    """The logits of each pass from now on."""
    seen: list[torch.Tensor] = []
    model = engine._model

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


def assert_equals_oracle(
    folder: Path, oracle: Any, length: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of a prompt of this length that is cut anywhere and of 50 tokens after it are within the tolerance of the
    oracle, relative to its largest, and each token is its likeliest. oracle: transformers' model in float64."""
    prompt = torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    budget = random.randint(1, max(2, length))
    engine = Engine(folder, pool_size_bytes=16 << 20, max_batch_tokens=budget, block_size=5, draft=())
    logits = watched(engine)
    (result,) = engine.run([Request("r", prompt, max_tokens=50, ignore_eos=True)])
    engine.close()
    assert result.error is None
    with in_float64(monkeypatch):
        expected = oracle(torch.tensor([prompt + result.token_ids[:-1]]), use_cache=False).logits[0, length - 1 :]
    assert expected.dtype == torch.float64
    found = torch.cat(logits)[-50:]
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"
    assert result.token_ids == expected.argmax(1).tolist()
