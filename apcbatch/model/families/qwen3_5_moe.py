"""Qwen3.5 with experts: its mixers, then a mixture of experts and in parallel an expert that all tokens share.

Yang et al., "Qwen2 Technical Report", arXiv 2407.10671, section 2.2.2. Only the text model of a multimodal checkpoint
is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from apcbatch.model.families import qwen3_5
from apcbatch.model.families.qwen3_5 import Qwen35Config
from apcbatch.model.feed_forward import SHARED_EXPERT, mixture
from apcbatch.model.hf_config import ConfigReader, ModelConfig
from apcbatch.model.sub_blocks import SubBlock


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(Qwen35Config):
    """Qwen35Config with experts. intermediate_size: inner columns of an expert. shared_intermediate_size: those of the
    shared one. norm_topk_prob: whether the weights of a token's experts are divided by their sum."""

    shared_intermediate_size: int
    norm_topk_prob: bool


_DEFAULTS = {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}


def read(whole: ConfigReader, family: str, defaults: Mapping[str, int] = _DEFAULTS) -> Qwen35MoeConfig:
    """Return the ModelConfig of config.json. defaults: values for missing keys that are not Qwen3.5's."""
    dense, reader = qwen3_5.read(whole, family, defaults), whole.text_model().with_defaults(defaults)
    experts, per_tok = reader.integer("num_experts", 256), reader.integer("num_experts_per_tok", 8)
    if per_tok > experts:
        raise reader.wrong("num_experts_per_tok", per_tok, f"at most {experts} experts")
    fields = {
        **vars(dense),
        "feed_forwards": ("moe",) * dense.num_layers,
        "intermediate_size": reader.integer("moe_intermediate_size", 512),
        "num_experts": experts,
        "num_experts_per_tok": per_tok,
        "shared_intermediate_size": reader.integer("shared_expert_intermediate_size", 512),
        "norm_topk_prob": reader.flag("norm_topk_prob", True),
    }
    return Qwen35MoeConfig(**fields)


_SHARED = SubBlock("post_attention_layernorm", "mlp", SHARED_EXPERT)
_EXPERTS = {
    is_normalised: (SubBlock("post_attention_layernorm", "mlp", mixture("gate", is_normalised)), _SHARED)
    for is_normalised in (False, True)
}


def experts(config: ModelConfig) -> tuple[SubBlock, ...]:
    """Return the feed-forward sub-blocks of a layer."""
    assert isinstance(config, Qwen35MoeConfig)
    return _EXPERTS[config.norm_topk_prob]


FAMILY = replace(
    qwen3_5.FAMILY,
    model_type="qwen3_5_moe",
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    model_types=("qwen3_5_moe_text",),
    read=read,
    layer=lambda config, i: (qwen3_5.MIXERS[config.mixers[i]], *experts(config)),
)
