"""Qwen3.5 with experts: its mixers, then a mixture of experts and in parallel an expert that all tokens share.

Yang et al., "Qwen2 Technical Report", arXiv 2407.10671, section 2.2.2. Only the text model of a multimodal checkpoint
is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from apcbatch.model.families import qwen3_5
from apcbatch.model.feed_forward import Mixture, Mlp
from apcbatch.model.hf_config import ConfigReader, ModelConfig
from apcbatch.model.sub_blocks import SubBlock

_DEFAULTS = {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}


def read(whole: ConfigReader, defaults: Mapping[str, int] = _DEFAULTS, is_grouped: bool = False) -> ModelConfig:
    """Return the ModelConfig of config.json; see apcbatch.model.families.qwen3_5."""
    dense, reader = qwen3_5.read(whole, defaults, is_grouped), whole.text_model().with_defaults(defaults)
    experts = reader.integer("num_experts", 256)
    mixture = Mixture(
        experts=experts,
        per_token=reader.experts_per_token(experts, 8),
        expert=Mlp(reader.integer("moe_intermediate_size", 512)),
        router="gate",
        is_normalised=reader.flag("norm_topk_prob", True),
    )
    shared = Mlp(
        reader.integer("shared_expert_intermediate_size", 512),
        ("shared_expert.gate_proj", "shared_expert.up_proj"),
        "shared_expert.down_proj",
        token_gate="shared_expert_gate",
    )
    return replace(
        dense,
        feed_forwards=("moe",) * dense.num_layers,
        blocks={
            **{mixer: dense.blocks[mixer] for mixer in ("delta", "attention")},
            "moe": tuple(SubBlock("post_attention_layernorm", "mlp", kind) for kind in (mixture, shared)),
        },
        fields={
            "intermediate_size": mixture.expert.columns,
            "shared_intermediate_size": shared.columns,
            "norm_topk_prob": mixture.is_normalised,
        },
    )


FAMILY = replace(
    qwen3_5.FAMILY,
    model_type="qwen3_5_moe",
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    model_types=("qwen3_5_moe_text",),
    read=read,
)
