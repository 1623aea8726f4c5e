"""Bamba: each layer has a Mamba-2 mixer, or in places attention with rotary positions over half of a head, and then an
MLP. IBM, Princeton, CMU and UIUC, "Bamba", https://huggingface.co/blog/bamba.
"""

from __future__ import annotations

from apcbatch.model.attention import Attention
from apcbatch.model.families.mamba2 import read_mixer
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import Mlp
from apcbatch.model.hf_config import MOST_LAYERS, ConfigReader, ModelConfig
from apcbatch.model.rotary import read_rotary
from apcbatch.model.sub_blocks import SubBlock


def read(reader: ConfigReader) -> ModelConfig:
    for bias in ("attention_bias", "mamba_proj_bias", "mlp_bias"):
        reader.require(bias, False, False)
    hidden_size = reader.integer("hidden_size", 4096)
    heads = reader.integer("num_attention_heads", 32)
    kv_heads = reader.kv_heads(heads, default=8)
    head_dim = reader.head_dim(hidden_size, heads)
    # transformers reads the factor inside rope_parameters alone; beside it, any value means a half.
    rotary_reader = ConfigReader(reader.path, {**reader.values, "partial_rotary_factor": 0.5})
    attention = Attention(heads, kv_heads, head_dim, read_rotary(rotary_reader, head_dim, default_factor=0.5))
    layers = reader.integer("num_hidden_layers", 32, maximum=MOST_LAYERS)
    has_attention = reader.values.get("attn_layer_indices") is not None
    places = reader.places("attn_layer_indices", layers) if has_attention else frozenset()
    mixers = tuple("attention" if i in places else "mamba2" for i in range(layers))
    reader.require_state(mixers, "Mamba-2")
    mamba2 = read_mixer(reader, reader.expanded("mamba_expand", hidden_size))
    mlp = Mlp(reader.integer("intermediate_size", 14336))
    return ModelConfig(
        vocab_size=reader.integer("vocab_size", 128000),
        hidden_size=hidden_size,
        mixers=mixers,
        feed_forwards=("mlp",) * layers,
        blocks={
            "mamba2": (SubBlock("input_layernorm", "mamba", mamba2),),
            "attention": (SubBlock("input_layernorm", "self_attn", attention),),
            "mlp": (SubBlock("pre_ff_layernorm", "feed_forward", mlp),),
        },
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        context_length=reader.integer("max_position_embeddings", 262144),
        fields={"intermediate_size": mlp.columns},
    )


FAMILY = Family(
    model_type="bamba",
    architectures=("BambaForCausalLM",),
    read=read,
    final_norm="model.final_layernorm",
    rank=7,
)
