"""The shapes of the two bundled models, as config.json has them: a Mamba, and a Jamba with two attention layers.

Both have tied embeddings; the Mamba has 2.8 million parameters, the Jamba 3.7 (5.5 and 7.5 MB in bfloat16). The Jamba
has every kind of layer there is, one of them with experts. Must not know: text, training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo_model.tokenizer import BOS, CONTROL, END, MAX_TOKENS, PAD, VOCAB_SIZE

BOS_ID, END_ID, PAD_ID = (CONTROL.index(token) for token in (BOS, END, PAD))
RMS_EPS = 1e-6
D_CONV = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. attention, experts: which layers have them; a Mamba has neither, nor any feed-forward part."""

    family: str
    hidden_size: int
    layers: int
    d_state: int
    dt_rank: int
    intermediate_size: int = 0
    heads: int = 0
    kv_heads: int = 0
    attention_period: int = 0
    attention_offset: int = 0
    expert_period: int = 0
    expert_offset: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def d_inner(self) -> int:
        """Channels of a Mamba mixer."""
        return 2 * self.hidden_size

    def is_attention(self, layer: int) -> bool:
        """Whether the layer mixes by attention."""
        return bool(self.heads) and layer % self.attention_period == self.attention_offset

    def is_mixture(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return bool(self.experts) and layer % self.expert_period == self.expert_offset


MAMBA = Shape(family="mamba", hidden_size=256, layers=4, d_state=16, dt_rank=16)
JAMBA = Shape(
    family="jamba",
    hidden_size=192,
    layers=8,
    d_state=16,
    dt_rank=12,
    intermediate_size=192,
    heads=4,
    kv_heads=2,
    attention_period=3,
    attention_offset=2,
    expert_period=8,
    expert_offset=4,
    experts=4,
    experts_per_token=2,
)
SHAPES = {shape.family: shape for shape in (MAMBA, JAMBA)}


def config(shape: Shape) -> dict[str, Any]:
    """The contents of config.json."""
    common = {
        "bos_token_id": BOS_ID,
        "dtype": "bfloat16",
        "eos_token_id": END_ID,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "num_hidden_layers": shape.layers,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }
    return common | (_jamba(shape) if shape.heads else _mamba(shape))


def _mamba(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["MambaForCausalLM"],
        "conv_kernel": D_CONV,
        "expand": 2,
        "intermediate_size": shape.d_inner,
        "layer_norm_epsilon": RMS_EPS,
        "model_type": "mamba",
        "rescale_prenorm_residual": False,
        "residual_in_fp32": True,
        "state_size": shape.d_state,
        "time_step_rank": shape.dt_rank,
        "use_bias": False,
        "use_conv_bias": True,
    }


def _jamba(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["JambaForCausalLM"],
        "attention_dropout": 0.0,
        "attn_layer_offset": shape.attention_offset,
        "attn_layer_period": shape.attention_period,
        "expert_layer_offset": shape.expert_offset,
        "expert_layer_period": shape.expert_period,
        "intermediate_size": shape.intermediate_size,
        "mamba_conv_bias": True,
        "mamba_d_conv": D_CONV,
        "mamba_d_state": shape.d_state,
        "mamba_dt_rank": shape.dt_rank,
        "mamba_expand": 2,
        "mamba_proj_bias": False,
        "max_position_embeddings": MAX_TOKENS,
        "model_type": "jamba",
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "num_key_value_heads": shape.kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": RMS_EPS,
        "router_aux_loss_coef": 0.001,
        "use_mamba_kernels": False,
    }


def generation_config() -> dict[str, Any]:
    """The contents of generation_config.json."""
    return {"bos_token_id": BOS_ID, "do_sample": False, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
