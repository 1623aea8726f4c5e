"""Jamba: each layer has a Mamba-1 mixer, or periodically attention, and then an MLP or a mixture of experts. Lieber et
al., arXiv 2403.19887."""

from __future__ import annotations

from apcbatch.errors import ModelError
from apcbatch.model.attention import Attention
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import Mixture, Mlp
from apcbatch.model.hf_config import MOST_LAYERS, ConfigReader, ModelConfig
from apcbatch.model.mamba import Mamba
from apcbatch.model.sub_blocks import SubBlock


def read(reader: ConfigReader) -> ModelConfig:
    hidden_size = reader.integer("hidden_size", 4096)
    layers = range(reader.integer("num_hidden_layers", 32, maximum=MOST_LAYERS))
    heads = reader.integer("num_attention_heads", 32)
    kv_heads = reader.integer("num_key_value_heads", 8)
    if hidden_size % heads or heads % kv_heads:
        raise ModelError(
            f"{reader.path}: hidden_size {hidden_size}, num_attention_heads {heads}, num_key_value_heads {kv_heads}; "
            "expected each to be a multiple of the next"
        )
    attention_period, attention_offset = _period(reader, "attn", 8, 4)
    expert_period, expert_offset = _period(reader, "expert", 2, 1)
    experts = reader.integer("num_experts", 16)
    experts_per_tok = reader.integer("num_experts_per_tok", 2)
    if experts > 1 and experts_per_tok > experts:
        raise ModelError(f"{reader.path}: num_experts_per_tok is {experts_per_tok}; expected at most {experts} experts")
    mixers = ["attention" if i % attention_period == attention_offset else "mamba" for i in layers]
    if "mamba" not in mixers:
        raise ModelError(
            f"{reader.path}: attn_layer_period {attention_period} and attn_layer_offset {attention_offset} make all of "
            f"{len(mixers)} layers attention; expected a Mamba layer, whose state can be kept"
        )
    feed_forwards = ["moe" if experts > 1 and i % expert_period == expert_offset else "mlp" for i in layers]
    mamba = Mamba(
        d_inner=reader.expanded("mamba_expand", hidden_size),
        d_state=reader.integer("mamba_d_state", 16),
        d_conv=reader.integer("mamba_d_conv", 4, minimum=2),
        dt_rank=reader.dt_rank("mamba_dt_rank", hidden_size),
        conv_bias=reader.flag("mamba_conv_bias", True),
        proj_bias=reader.flag("mamba_proj_bias", False),
        mixer_norm="weighted",
        mixer_norm_eps=reader.number("rms_norm_eps", 1e-6),
    )
    attention = Attention(heads, kv_heads, hidden_size // heads)
    mlp = Mlp(reader.integer("intermediate_size", 14336))
    mixture = Mixture(experts=experts, per_token=experts_per_tok, expert=mlp, router="router")
    return ModelConfig(
        vocab_size=reader.integer("vocab_size", 65536),
        hidden_size=hidden_size,
        mixers=tuple(mixers),
        feed_forwards=tuple(feed_forwards),
        blocks={
            "mamba": (SubBlock("input_layernorm", "mamba", mamba),),
            "attention": (SubBlock("input_layernorm", "self_attn", attention),),
            "mlp": (SubBlock("pre_ff_layernorm", "feed_forward", mlp),),
            "moe": (SubBlock("pre_ff_layernorm", "feed_forward", mixture),),
        },
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        context_length=reader.integer("max_position_embeddings", 262144),
        fields={"intermediate_size": mlp.columns},
    )


def _period(reader: ConfigReader, kind: str, period_default: int, offset_default: int) -> tuple[int, int]:
    period = reader.integer(f"{kind}_layer_period", period_default)
    offset = reader.integer(f"{kind}_layer_offset", offset_default, minimum=0)
    if offset >= period:
        raise ModelError(f"{reader.path}: {kind}_layer_offset is {offset}; expected less than the period, {period}")
    return period, offset


FAMILY = Family(
    model_type="jamba",
    architectures=("JambaForCausalLM",),
    read=read,
    final_norm="model.final_layernorm",
    rank=2,
)
