"""Nemotron-H, also Nemotron Nano 2 and Nemotron 3: each layer is a Mamba-2 mixer, attention without position
embeddings, an MLP with a squared ReLU, or a mixture of such experts in parallel with a shared one.

NVIDIA, "Nemotron-H", arXiv 2504.03624, and "Nemotron 3 Nano", arXiv 2512.20848. Heads that predict further tokens
(mtp.*) are ignored.
"""

from __future__ import annotations

from apcbatch.model.attention import Attention
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import Mixture, Mlp, Sigmoid
from apcbatch.model.hf_config import MOST_LAYERS, ConfigReader, ModelConfig
from apcbatch.model.mamba2 import Mamba2
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


def read(reader: ConfigReader) -> ModelConfig:
    """Return the ModelConfig of config.json. A layer with a mixer has "none" in feed_forwards, any other one has it in
    mixers."""
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
    mamba2 = Mamba2(
        heads=mamba_heads,
        head_dim=mamba_head_dim,
        groups=groups,
        d_state=reader.integer("ssm_state_size", 128),
        d_conv=reader.integer("conv_kernel", 4, minimum=2),
        conv_bias=reader.flag("use_conv_bias", True),
        time_step_limit=reader.interval("time_step_limit", (0.0, float("inf"))),
    )
    head_dim = reader.integer("head_dim", reader.integer("attention_head_dim", 128))
    mlp = _mlp(reader.integer("intermediate_size", 21504) if "mlp" in kinds else 0)
    mixture, choice, shared = _experts(reader) if "moe" in kinds else _NO_EXPERTS
    return ModelConfig(
        vocab_size=reader.integer("vocab_size", 131072),
        hidden_size=reader.integer("hidden_size", 4096),
        mixers=tuple(kind if kind in ("mamba2", "attention") else "none" for kind in kinds),
        feed_forwards=tuple(kind if kind in ("mlp", "moe") else "none" for kind in kinds),
        blocks={
            "mamba2": (SubBlock("norm", "mixer", mamba2),),
            "attention": (SubBlock("norm", "mixer", Attention(heads, kv_heads, head_dim)),),
            "mlp": (SubBlock("norm", "mixer", mlp),),
            "moe": (SubBlock("norm", "mixer", mixture), SubBlock("norm", "mixer.shared_experts", shared)),
        },
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        context_length=reader.integer("max_position_embeddings", 4096),
        fields={
            "intermediate_size": mlp.columns,
            "moe_intermediate_size": mixture.expert.columns,
            "moe_shared_expert_intermediate_size": shared.columns,
            "moe_latent_size": mixture.latent,
            "n_group": choice.groups,
            "topk_group": choice.top_groups,
            "norm_topk_prob": mixture.is_normalised,
            "routed_scaling_factor": choice.scale,
        },
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


def _mlp(columns: int) -> Mlp:
    """Return an MLP or expert with a squared ReLU."""
    return Mlp(columns, ("up_proj",), is_gated=False)


def _experts(reader: ConfigReader) -> tuple[Mixture, Sigmoid, Mlp]:
    """Return the mixture of experts, its choice of experts, and the expert that all tokens share."""
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
    choice = Sigmoid("gate.e_score_correction_bias", groups, top_groups, reader.number("routed_scaling_factor", 1.0))
    mixture = Mixture(
        experts=experts,
        per_token=per_token,
        expert=_mlp(reader.integer("moe_intermediate_size", 7688)),
        router="gate",
        is_normalised=reader.flag("norm_topk_prob", True),
        sigmoid=choice,
        float32_router=True,
        latent=0 if latent is None else reader.integer("moe_latent_size", 1),
    )
    return mixture, choice, _mlp(reader.integer("moe_shared_expert_intermediate_size", 7688))


_NO_EXPERTS = Mixture(experts=0, per_token=0, expert=_mlp(0), router="gate"), Sigmoid(None, 0, 0, 0.0), _mlp(0)

FAMILY = Family(
    model_type="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    read=read,
    embedding="backbone.embeddings",
    layers="backbone.layers",
    final_norm="backbone.norm_f",
    ignored=("mtp.",),
    rank=6,
)
