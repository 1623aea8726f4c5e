"""What a model's snapshots weigh, from its configuration alone.

Must not know: torch, weights; model/arena.py allocates what is counted here.
"""

from __future__ import annotations

from apcbatch.model.hf_config import ModelConfig

ACTIVATION_BYTES = {"float32": 4, "bfloat16": 2}


def state_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of one snapshot's recurrent states (float32) and convolution tails (the activations' dtype)."""
    per_channel = 4 * config.d_state + ACTIVATION_BYTES[dtype] * (config.d_conv - 1)
    return config.num_mamba_layers * config.d_inner * per_channel


def kv_token_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of one token's keys and values over all attention layers; 0 for a model without attention."""
    per_layer = 2 * config.num_key_value_heads * config.head_dim * ACTIVATION_BYTES[dtype]
    return config.num_attention_layers * per_layer
