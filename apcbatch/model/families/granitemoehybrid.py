"""Granite 4.0-H: each layer has a Mamba-2 mixer, or attention without position embeddings, and then an MLP, in some
models in parallel with a mixture of experts.

Embeddings, outputs of sub-blocks, attention scores and logits have multipliers, in the manner of Yang et al., "Tensor
Programs V", arXiv 2203.03466.
"""

from __future__ import annotations

from dataclasses import dataclass

from apcbatch.model.attention import ATTENTION
from apcbatch.model.families.mamba2 import Mamba2Config, read_mixers
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import NORMALISED_MIXTURE, SHARED_MLP
from apcbatch.model.hf_config import LARGEST_NUMBER, MOST_LAYERS, ConfigReader, Multipliers
from apcbatch.model.mamba2 import MAMBA2
from apcbatch.model.sub_blocks import SubBlock

_MIXER_OF_TYPE = {
    "linear_attention": "mamba2",
    "full_attention": "attention",
    "mamba": "mamba2",  # the names before transformers 5
    "attention": "attention",
}


@dataclass(frozen=True)
class GraniteConfig(Mamba2Config):
    """Mamba2Config with multipliers. intermediate_size: inner columns of an expert. shared_intermediate_size: those of
    the MLP."""

    shared_intermediate_size: int = 0
    multipliers: Multipliers = Multipliers()


def read(reader: ConfigReader, family: str) -> GraniteConfig:
    """Return the ModelConfig of config.json."""
    layers = reader.integer("num_hidden_layers", 32, maximum=MOST_LAYERS)
    mixers = reader.layer_types(layers, _MIXER_OF_TYPE, "layer_types", "layers_block_type") or ("mamba2",) * layers
    reader.require_state(mixers, "mamba")  # first, as Granite 4.0 without `-h` has rotary positions too
    reader.require("position_embedding_type", None, "nope", None)
    reader.require("attention_bias", False, False)
    reader.require("mamba_proj_bias", False, False)
    hidden_size = reader.integer("hidden_size", 4096)
    heads = reader.integer("num_attention_heads", 32)
    kv_heads = reader.kv_heads(heads, default=heads)
    experts, experts_per_tok = reader.integer("num_local_experts", 8, minimum=0), 0
    if experts:
        experts_per_tok = reader.integer("num_experts_per_tok", 2)
        if experts_per_tok > experts:
            raise reader.wrong("num_experts_per_tok", experts_per_tok, f"at most {experts} experts")
    return GraniteConfig(
        family=family,
        vocab_size=reader.integer("vocab_size", 32000),
        hidden_size=hidden_size,
        mixers=mixers,
        feed_forwards=("moe" if experts else "mlp",) * layers,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        intermediate_size=reader.integer("intermediate_size", 11008) if experts else 0,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=reader.head_dim(hidden_size, heads),
        num_experts=experts,
        num_experts_per_tok=experts_per_tok,
        context_length=reader.integer("max_position_embeddings", 2048),
        shared_intermediate_size=reader.integer("shared_intermediate_size", 1024),
        multipliers=Multipliers(
            embedding=reader.number("embedding_multiplier", 1.0),
            residual=reader.number("residual_multiplier", 1.0),
            attention=reader.number("attention_multiplier", 1.0),
            logits=1 / reader.number("logits_scaling", 1.0, minimum=1 / LARGEST_NUMBER),
        ),
        **read_mixers(reader, reader.expanded("mamba_expand", hidden_size)),
    )


_MIXERS = {
    "mamba2": SubBlock("input_layernorm", "mamba", MAMBA2),
    "attention": SubBlock("input_layernorm", "self_attn", ATTENTION),
}
_SHARED = SubBlock("post_attention_layernorm", "shared_mlp", SHARED_MLP)
_FEED_FORWARDS = {
    "mlp": (_SHARED,),
    "moe": (SubBlock("post_attention_layernorm", "block_sparse_moe", NORMALISED_MIXTURE), _SHARED),
}

FAMILY = Family(
    model_type="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    read=read,
    embedding="model.embed_tokens",
    layers="model.layers",
    final_norm="model.norm",
    layer=lambda config, i: (_MIXERS[config.mixers[i]], *_FEED_FORWARDS[config.feed_forwards[i]]),
    rank=5,
)
