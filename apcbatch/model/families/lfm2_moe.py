"""LFM2 with experts: the layers of LFM2, of which all but the first ones have a mixture of experts instead of an MLP.

Liquid AI, "LFM2 Technical Report", arXiv 2511.23404.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from apcbatch.model.families import lfm2
from apcbatch.model.families.lfm2 import Lfm2Config
from apcbatch.model.feed_forward import SIGMOID_MIXTURE
from apcbatch.model.hf_config import ConfigReader
from apcbatch.model.sub_blocks import SubBlock


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config):
    """Lfm2Config with the sizes and the routing of the experts. intermediate_size: inner columns of an MLP.
    use_expert_bias: whether a bias is added to the scores for the choice of experts."""

    moe_intermediate_size: int
    use_expert_bias: bool
    norm_topk_prob: bool
    routed_scaling_factor: float


_DEFAULTS = {"hidden_size": 2048, "intermediate_size": 7168, "block_auto_adjust_ff_dim": False}


def read(given: ConfigReader, family: str) -> Lfm2MoeConfig:
    """Return the ModelConfig of config.json."""
    reader = given.with_defaults(_DEFAULTS)
    dense = lfm2.read(reader, family)
    num_dense = reader.integer("num_dense_layers", 2, minimum=0)
    experts, per_tok = reader.integer("num_experts", 32), reader.integer("num_experts_per_tok", 4)
    if per_tok > experts:
        raise reader.wrong("num_experts_per_tok", per_tok, f"at most {experts} experts")
    fields = {
        **vars(dense),
        "feed_forwards": tuple("mlp" if i < num_dense else "moe" for i in range(dense.num_layers)),
        "intermediate_size": reader.integer("intermediate_size", 7168),  # LFM2's rules of rounding do not apply
        "moe_intermediate_size": reader.integer("moe_intermediate_size", 1792),
        "num_experts": experts,
        "num_experts_per_tok": per_tok,
        "use_expert_bias": reader.flag("use_expert_bias", True),
        "norm_topk_prob": reader.flag("norm_topk_prob", True),
        "routed_scaling_factor": reader.number("routed_scaling_factor", 1.0),
    }
    return Lfm2MoeConfig(**fields)


_FEED_FORWARDS = {"mlp": lfm2.FEED_FORWARD, "moe": SubBlock("ffn_norm", "feed_forward", SIGMOID_MIXTURE)}

FAMILY = replace(
    lfm2.FAMILY,
    model_type="lfm2_moe",
    architectures=("Lfm2MoeForCausalLM",),
    read=read,
    layer=lambda config, i: (lfm2.MIXERS[config.mixers[i]], _FEED_FORWARDS[config.feed_forwards[i]]),
)
