"""The models against `transformers`, on tiny random checkpoints with odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from apcbatch import Engine, Request
from apcbatch.engine.sequence import make_sequence
from apcbatch.engine.step import Chunk, make_batch
from tests.tiny import VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {
    "mamba": ("mamba", {}),
    "mamba-one-layer": ("mamba", {"num_hidden_layers": 1, "time_step_rank": 1, "conv_kernel": 2}),
    "mamba-biases": ("mamba", {"use_bias": True, "use_conv_bias": False, "state_size": 24, "conv_kernel": 3}),
    "mamba-untied": (
        "mamba",
        {"tie_word_embeddings": False, "state_size": 16, "hidden_size": 50, "expand": 3},
    ),
    "falcon": ("falcon_mamba", {}),
    "falcon-biases": ("falcon_mamba", {"use_bias": True, "mixer_rms_eps": 1e-5, "state_size": 16}),
    "mamba2": ("mamba2", {}),
    "mamba2-one-group": ("mamba2", {"n_groups": 1, "tie_word_embeddings": True, "conv_kernel": 3}),
    "mamba2-wide": ("mamba2", {"n_groups": 6, "head_dim": 24, "expand": 4, "state_size": 13, "use_conv_bias": False}),
    "granite": ("granitemoehybrid", {}),
    "granite-experts": ("granitemoehybrid", {"num_experts_per_tok": 5, "num_local_experts": 7}),
    "granite-dense": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "linear_attention"],
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "mamba_n_groups": 1,
            "mamba_n_heads": 3,
            "mamba_expand": 3,
            "mamba_conv_bias": False,
            "logits_scaling": 0.7,
            "embedding_multiplier": 0.3,
        },
    ),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1-norm-first": ("falcon_h1", {"mamba_rms_norm": True, "num_key_value_heads": 4, "head_dim": 8}),
    "falcon-h1-gate-first": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "tie_word_embeddings": True,
            "mamba_d_ssm": None,
            "mamba_n_heads": 4,
            "mamba_conv_bias": False,
            "mlp_multipliers": None,
            "ssm_multipliers": None,
        },
    ),
    "bamba": ("bamba", {}),
    "lfm2-experts": ("lfm2_moe", {}),
    "nemotron": ("nemotron_h", {}),
    "nemotron-latent": (
        "nemotron_h",
        {"moe_latent_size": 16, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_experts_per_tok": 1},
    ),
    "nemotron-dense": (
        "nemotron_h",
        {
            "num_hidden_layers": 3,
            "layer_types": ["mlp", "linear_attention", "full_attention"],
            "n_groups": 1,
            "head_dim": 24,
            "num_key_value_heads": 4,
            "conv_kernel": 3,
            "use_conv_bias": False,
        },
    ),
    "jamba-experts": ("jamba", {}),
    "jamba-dense": ("jamba", {"num_experts": 1, "num_experts_per_tok": 1}),
    "jamba-tied": ("jamba", {"tie_word_embeddings": True, "num_key_value_heads": 1, "mamba_d_conv": 2}),
    "jamba-periods": (
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "num_experts_per_tok": 3,
            "mamba_d_state": 24,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "num_key_value_heads": 4,
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> tuple[Path, Any]:
    """(a checkpoint, the model that transformers makes of it)"""
    name, overrides = CASES[request.param]
    folder = tiny_checkpoint(name, **overrides)
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_logits_equal_transformers(case: tuple[Path, Any]) -> None:
    """Catches any departure from the architecture: logits within 2e-4 relative of the outside oracle, packed raggedly
    with another sequence in front."""
    folder, oracle = case
    tokens = torch.randint(1, VOCAB, (75,))
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0, -1]
    engine = Engine(folder, pool_size_bytes=64 << 20, max_running=4)
    scheduler = engine._scheduler
    for ids in (torch.randint(1, VOCAB, (13,)), tokens):
        sequence = make_sequence(Request("r", ids.tolist()), VOCAB, None)
        engine._snapshots.prepare(sequence)
        scheduler.submit(sequence)
    chunks, _ = scheduler.schedule()
    logits = engine._model.forward(make_batch(chunks))[1]
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error <= 2e-4, f"relative error {error:.2e}"


def test_greedy_tokens_equal_transformers(case: tuple[Path, Any]) -> None:
    """Catches state that goes wrong while decoding: each of 64 greedy tokens is the likeliest that the outside oracle
    sees after those before it."""
    folder, oracle = case
    tokens = torch.randint(1, VOCAB, (21,), generator=torch.Generator().manual_seed(5)).tolist()
    engine = Engine(folder, pool_size_bytes=64 << 20, block_size=7)
    (result,) = engine.run([Request("r", tokens, max_tokens=64, ignore_eos=True)])
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens + result.token_ids[:-1]])).logits[0]
    assert result.token_ids == logits[20:].argmax(1).tolist()


def test_chunk_type_is_what_the_scheduler_makes() -> None:
    """Catches a pass that samples before the prompt's end: only the chunk that reaches it yields a token."""
    sequence = make_sequence(Request("r", [1, 2, 3, 4]), VOCAB, None)
    assert not Chunk(sequence, 0, 3).samples
    assert Chunk(sequence, 0, 4).samples
