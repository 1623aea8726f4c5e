"""LFM2 with experts: the layers of LFM2, of which all but the first ones have a mixture of experts instead of an MLP.

Liquid AI, "LFM2 Technical Report", arXiv 2511.23404.
"""

from __future__ import annotations

from dataclasses import replace

from apcbatch.model.families import lfm2
from apcbatch.model.feed_forward import Mixture, Sigmoid
from apcbatch.model.hf_config import ConfigReader, ModelConfig
from apcbatch.model.sub_blocks import SubBlock

_DEFAULTS = {"hidden_size": 2048, "intermediate_size": 7168, "block_auto_adjust_ff_dim": False}


def read(given: ConfigReader) -> ModelConfig:
    reader = given.with_defaults(_DEFAULTS)
    dense = lfm2.read(reader)
    num_dense = reader.integer("num_dense_layers", 2, minimum=0)
    experts = reader.integer("num_experts", 32)
    mlp = lfm2.mlp(reader.integer("intermediate_size", 7168))  # LFM2's rules of rounding do not apply
    has_bias, scale = reader.flag("use_expert_bias", True), reader.number("routed_scaling_factor", 1.0)
    mixture = Mixture(
        experts=experts,
        per_token=reader.experts_per_token(experts, 4),
        expert=lfm2.mlp(reader.integer("moe_intermediate_size", 1792)),
        router="gate",
        is_normalised=reader.flag("norm_topk_prob", True),
        sigmoid=Sigmoid("expert_bias" if has_bias else None, scale=scale, eps=1e-6),
    )
    return replace(
        dense,
        feed_forwards=tuple("mlp" if i < num_dense else "moe" for i in range(dense.num_layers)),
        blocks={
            **dense.blocks,
            "mlp": (SubBlock("ffn_norm", "feed_forward", mlp),),
            "moe": (SubBlock("ffn_norm", "feed_forward", mixture),),
        },
        fields={
            "intermediate_size": mlp.columns,
            "moe_intermediate_size": mixture.expert.columns,
            "use_expert_bias": has_bias,
            "norm_topk_prob": mixture.is_normalised,
            "routed_scaling_factor": scale,
        },
    )


FAMILY = replace(
    lfm2.FAMILY,
    model_type="lfm2_moe",
    architectures=("Lfm2MoeForCausalLM",),
    read=read,
)
