"""Bamba: each layer has a Mamba-2 mixer, or in places attention with rotary positions over half of a head, and then an
MLP. IBM, Princeton, CMU and UIUC, "Bamba", https://huggingface.co/blog/bamba.
"""

from __future__ import annotations

from dataclasses import dataclass

from apcbatch.model.attention import ROTARY_ATTENTION
from apcbatch.model.families.mamba2 import Mamba2Config, read_mixers
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import MLP
from apcbatch.model.hf_config import MOST_LAYERS, ConfigReader
from apcbatch.model.mamba2 import MAMBA2
from apcbatch.model.rotary import read_rotary
from apcbatch.model.sub_blocks import SubBlock


@dataclass(frozen=True)
class BambaConfig(Mamba2Config):
    """Mamba2Config with rotary position embeddings. rotary_dim: rotated columns of an attention head. rope_theta: base
    of the embedding's wavelengths."""

    rotary_dim: int = 0
    rope_theta: float = 0.0


def read(reader: ConfigReader, family: str) -> BambaConfig:
    """Return the ModelConfig of config.json."""
    for bias in ("attention_bias", "mamba_proj_bias", "mlp_bias"):
        reader.require(bias, False, False)
    hidden_size = reader.integer("hidden_size", 4096)
    heads = reader.integer("num_attention_heads", 32)
    kv_heads = reader.kv_heads(heads, default=8)
    head_dim = reader.head_dim(hidden_size, heads)
    # transformers reads the factor inside rope_parameters alone; beside it, any value means a half.
    rotary_reader = ConfigReader(reader.path, {**reader.values, "partial_rotary_factor": 0.5})
    rotary = read_rotary(rotary_reader, head_dim, default_factor=0.5)
    layers = reader.integer("num_hidden_layers", 32, maximum=MOST_LAYERS)
    has_attention = reader.values.get("attn_layer_indices") is not None
    places = reader.places("attn_layer_indices", layers) if has_attention else frozenset()
    mixers = tuple("attention" if i in places else "mamba2" for i in range(layers))
    reader.require_state(mixers, "Mamba-2")
    return BambaConfig(
        family=family,
        vocab_size=reader.integer("vocab_size", 128000),
        hidden_size=hidden_size,
        mixers=mixers,
        feed_forwards=("mlp",) * layers,
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        intermediate_size=reader.integer("intermediate_size", 14336),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        context_length=reader.integer("max_position_embeddings", 262144),
        rotary_dim=rotary.dim,
        rope_theta=rotary.theta,
        **read_mixers(reader, reader.expanded("mamba_expand", hidden_size)),
    )


_MIXERS = {
    "mamba2": SubBlock("input_layernorm", "mamba", MAMBA2),
    "attention": SubBlock("input_layernorm", "self_attn", ROTARY_ATTENTION),
}
_MLP = SubBlock("pre_ff_layernorm", "feed_forward", MLP)


FAMILY = Family(
    model_type="bamba",
    architectures=("BambaForCausalLM",),
    read=read,
    embedding="model.embed_tokens",
    layers="model.layers",
    final_norm="model.final_layernorm",
    layer=lambda config, i: (_MIXERS[config.mixers[i]], _MLP),
    rank=7,
)
