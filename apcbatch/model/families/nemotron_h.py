"""Nemotron-H, also Nemotron Nano 2 and Nemotron 3: each layer is a Mamba-2 mixer, attention without position
embeddings, an MLP with a squared ReLU, or a mixture of such experts in parallel with a shared one.

NVIDIA, "Nemotron-H", arXiv 2504.03624, and "Nemotron 3 Nano", arXiv 2512.20848. Heads that predict further tokens
(mtp.*) are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apcbatch.model.attention import ATTENTION
from apcbatch.model.families.mamba2 import Mamba2Config
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import RELU2_MIXTURE, relu2_mlp
from apcbatch.model.hf_config import MOST_LAYERS, ConfigReader
from apcbatch.model.mamba2 import MAMBA2
from apcbatch.model.sub_blocks import SubBlock

_KIND_OF_TYPE = {
    "linear_attention": "mamba2",
    "full_attention": "attention",
    "mamba": "mamba2",  # the names before transformers 5
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
_KIND_OF_LETTER = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True)
class NemotronHConfig(Mamba2Config):
    """Mamba2Config with the sizes and the routing of the experts. intermediate_size: inner columns of an MLP.
    moe_latent_size: columns of an expert's input and output; 0: hidden_size. A layer with a mixer has "none" in
    feed_forwards, any other one has it in mixers."""

    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int = 0
    n_group: int = 0
    topk_group: int = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 0.0


def read(reader: ConfigReader, family: str) -> NemotronHConfig:
    """Return the ModelConfig of config.json."""
    reader.require("mlp_hidden_act", "relu2", "relu2")
    reader.require("mamba_hidden_act", "silu", "silu", "swish")
    reader.require("sliding_window", None, None)
    for bias in ("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"):
        reader.require(bias, False, False)
    kinds = _kinds(reader)
    heads, kv_heads = reader.integer("num_attention_heads", 32), reader.integer("num_key_value_heads", 8)
    reader.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    mamba_heads, groups = reader.integer("mamba_num_heads", 128), reader.integer("n_groups", 8)
    mamba_head_dim = reader.integer("mamba_head_dim", 64)
    reader.require_multiple("mamba_num_heads", mamba_heads, "n_groups", groups)
    return NemotronHConfig(
        family=family,
        vocab_size=reader.integer("vocab_size", 131072),
        hidden_size=reader.integer("hidden_size", 4096),
        mixers=tuple(kind if kind in ("mamba2", "attention") else "none" for kind in kinds),
        feed_forwards=tuple(kind if kind in ("mlp", "moe") else "none" for kind in kinds),
        d_inner=mamba_heads * mamba_head_dim,
        d_state=reader.integer("ssm_state_size", 128),
        d_conv=reader.integer("conv_kernel", 4, minimum=2),
        conv_bias=reader.flag("use_conv_bias", True),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        intermediate_size=reader.integer("intermediate_size", 21504) if "mlp" in kinds else 0,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=reader.integer("head_dim", reader.integer("attention_head_dim", 128)),
        context_length=reader.integer("max_position_embeddings", 4096),
        mamba2_heads=mamba_heads,
        mamba2_head_dim=mamba_head_dim,
        mamba2_groups=groups,
        time_step_limit=reader.interval("time_step_limit", (0.0, float("inf"))),
        **(_experts(reader) if "moe" in kinds else {}),
    )


def _kinds(reader: ConfigReader) -> tuple[str, ...]:
    """Return the kind of each layer, from layers_block_type or else hybrid_override_pattern."""
    types, pattern = reader.values.get("layers_block_type"), reader.values.get("hybrid_override_pattern")
    key, listed = ("hybrid_override_pattern", pattern) if types is None else ("layers_block_type", types)
    if not isinstance(listed, str if types is None else list):
        raise reader.wrong(key, listed, "the type of each layer")
    layers = reader.integer("num_hidden_layers", len(listed), maximum=MOST_LAYERS)
    if types is not None:
        kinds = reader.layer_types(layers, _KIND_OF_TYPE, key) or ()
    elif len(listed) != layers or not set(listed) <= set(_KIND_OF_LETTER):
        raise reader.wrong(key, listed, f"{layers} letters, each of them {', '.join(_KIND_OF_LETTER)}")
    else:
        kinds = tuple(_KIND_OF_LETTER[letter] for letter in listed)
    if "mamba2" not in kinds:
        raise reader.wrong(key, listed, "a Mamba-2 layer (linear_attention, M), whose state can be kept")
    return kinds


def _experts(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields of the mixture of experts."""
    reader.require("n_shared_experts", 1, 1)
    experts, per_token = reader.integer("n_routed_experts", 8), reader.integer("num_experts_per_tok", 2)
    groups, top_groups = reader.integer("n_group", 1), reader.integer("topk_group", 1)
    if experts % groups or experts < 2 * groups:
        raise reader.wrong(
            "n_group", groups, f"a divisor of the {experts} experts that leaves 2 at least in each group"
        )
    if top_groups > groups:
        raise reader.wrong("topk_group", top_groups, f"at most {groups} groups")
    if per_token > (most := top_groups * experts // groups):
        raise reader.wrong("num_experts_per_tok", per_token, f"at most {most} experts, those of topk_group groups")
    latent = reader.values.get("moe_latent_size")
    return {
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": reader.integer("moe_intermediate_size", 7688),
        "moe_shared_expert_intermediate_size": reader.integer("moe_shared_expert_intermediate_size", 7688),
        "moe_latent_size": 0 if latent is None else reader.integer("moe_latent_size", 1),
        "n_group": groups,
        "topk_group": top_groups,
        "norm_topk_prob": reader.flag("norm_topk_prob", True),
        "routed_scaling_factor": reader.number("routed_scaling_factor", 1.0),
    }


_BLOCKS: dict[str, tuple[SubBlock, ...]] = {
    "none": (),
    "mamba2": (SubBlock("norm", "mixer", MAMBA2),),
    "attention": (SubBlock("norm", "mixer", ATTENTION),),
    "mlp": (SubBlock("norm", "mixer", relu2_mlp("intermediate_size")),),
    "moe": (
        SubBlock("norm", "mixer", RELU2_MIXTURE),
        SubBlock("norm", "mixer.shared_experts", relu2_mlp("moe_shared_expert_intermediate_size")),
    ),
}

FAMILY = Family(
    model_type="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    read=read,
    embedding="backbone.embeddings",
    layers="backbone.layers",
    final_norm="backbone.norm_f",
    layer=lambda config, i: (*_BLOCKS[config.mixers[i]], *_BLOCKS[config.feed_forwards[i]]),
    ignored=("mtp.",),
    rank=6,
)
