"""The matrix products of an architecture by name, from its configuration.

Must not know: weights, timing.
"""

from __future__ import annotations

from apcbatch.model.hf_config import ModelConfig


def product_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of every kind of product of a model, the vocabulary last."""
    h, d, n, r = config.hidden_size, config.d_inner, config.d_state, config.dt_rank
    shapes: dict[str, tuple[int, int]] = {}
    if config.num_mamba_layers:
        shapes.update(in_proj=(h, 2 * d), x_proj=(d, r + 2 * n), dt_proj=(r, d), out_proj=(d, h))
    if config.num_attention_layers:
        kv = config.num_key_value_heads * config.head_dim
        shapes.update(qkv_proj=(h, h + 2 * kv), o_proj=(h, h))
    if config.intermediate_size:
        shapes.update(gate_up_proj=(h, 2 * config.intermediate_size), down_proj=(config.intermediate_size, h))
    if "moe" in config.feed_forwards:
        shapes["router"] = (h, config.num_experts)
    return {**shapes, "lm_head": (h, config.vocab_size)}
