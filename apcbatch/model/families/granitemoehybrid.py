"""Granite 4.0-H: each layer has a Mamba-2 mixer, or attention without position embeddings, and then an MLP, in some
models in parallel with a mixture of experts.

Embeddings, outputs of sub-blocks, attention scores and logits have multipliers, in the manner of Yang et al., "Tensor
Programs V", arXiv 2203.03466.
"""

from __future__ import annotations

from dataclasses import asdict

from apcbatch.model.attention import Attention
from apcbatch.model.families.mamba2 import read_mixer
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import Mixture, Mlp
from apcbatch.model.hf_config import LARGEST_NUMBER, MOST_LAYERS, ConfigReader, ModelConfig, Multipliers
from apcbatch.model.sub_blocks import SubBlock

_MIXER_OF_TYPE = {
    "linear_attention": "mamba2",
    "full_attention": "attention",
    "mamba": "mamba2",  # the names before transformers 5
    "attention": "attention",
}


def read(reader: ConfigReader) -> ModelConfig:
    layers = reader.integer("num_hidden_layers", 32, maximum=MOST_LAYERS)
    mixers = reader.layer_types(layers, _MIXER_OF_TYPE, "layer_types", "layers_block_type") or ("mamba2",) * layers
    reader.require_state(mixers, "mamba")  # first, as Granite 4.0 without `-h` has rotary positions too
    reader.require("position_embedding_type", None, "nope", None)
    reader.require("attention_bias", False, False)
    reader.require("mamba_proj_bias", False, False)
    hidden_size = reader.integer("hidden_size", 4096)
    heads = reader.integer("num_attention_heads", 32)
    kv_heads = reader.kv_heads(heads, default=heads)
    experts = reader.integer("num_local_experts", 8, minimum=0)
    multipliers = Multipliers(
        embedding=reader.number("embedding_multiplier", 1.0),
        residual=reader.number("residual_multiplier", 1.0),
        attention=reader.number("attention_multiplier", 1.0),
        logits=1 / reader.number("logits_scaling", 1.0, minimum=1 / LARGEST_NUMBER),
    )
    attention = Attention(heads, kv_heads, reader.head_dim(hidden_size, heads), scale=multipliers.attention)
    expert = Mlp(reader.integer("intermediate_size", 11008) if experts else 0)
    mixture = Mixture(
        experts=experts,
        per_token=reader.experts_per_token(experts, 2) if experts else 0,
        expert=expert,
        router="router.layer",
        stacked=("input_linear.weight", "output_linear.weight"),
        is_normalised=True,
    )
    mlp = Mlp(reader.integer("shared_intermediate_size", 1024), ("input_linear",), "output_linear")
    shared = SubBlock("post_attention_layernorm", "shared_mlp", mlp)
    mamba2 = read_mixer(reader, reader.expanded("mamba_expand", hidden_size))
    return ModelConfig(
        vocab_size=reader.integer("vocab_size", 32000),
        hidden_size=hidden_size,
        mixers=mixers,
        feed_forwards=("moe" if experts else "mlp",) * layers,
        blocks={
            "mamba2": (SubBlock("input_layernorm", "mamba", mamba2),),
            "attention": (SubBlock("input_layernorm", "self_attn", attention),),
            "mlp": (shared,),
            "moe": (SubBlock("post_attention_layernorm", "block_sparse_moe", mixture), shared),
        },
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        context_length=reader.integer("max_position_embeddings", 2048),
        multipliers=multipliers,
        fields={
            "intermediate_size": expert.columns,
            "shared_intermediate_size": mlp.columns,
            "multipliers": asdict(multipliers),
        },
    )


FAMILY = Family(
    model_type="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    read=read,
    rank=5,
)
