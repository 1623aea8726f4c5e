"""LFM2: each layer has a gated short convolution, or in places attention with rotary positions, and then an MLP.

Liquid AI, "LFM2 Technical Report", arXiv 2511.23404.
"""

from __future__ import annotations

from apcbatch.model.attention import Attention
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import Mlp
from apcbatch.model.hf_config import LARGEST_SIZE, MOST_LAYERS, ConfigReader, ModelConfig
from apcbatch.model.rotary import read_whole_rotary
from apcbatch.model.short_conv import ShortConv
from apcbatch.model.sub_blocks import SubBlock

_MIXER_OF_TYPE = {"conv": "short_conv", "full_attention": "attention"}


def read(reader: ConfigReader) -> ModelConfig:
    hidden_size = reader.integer("hidden_size", 2560)
    for key in ("conv_dim", "conv_dim_out"):
        reader.require(key, hidden_size, hidden_size)
    for key in ("block_use_swiglu", "use_pos_enc"):
        reader.require(key, True, True)
    reader.require("conv_bias", False, False)
    heads, kv_heads = reader.integer("num_attention_heads", 32), reader.integer("num_key_value_heads", 8)
    reader.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    head_dim = reader.head_dim(hidden_size, heads)
    rotary = read_whole_rotary(reader, head_dim, default_theta=1e6)
    norms = ("q_layernorm", "k_layernorm")
    attention = Attention(heads, kv_heads, head_dim, rotary, norms=norms, output="out_proj")
    mixers = _mixers(reader)
    ties = "tie_embedding" if "tie_embedding" in reader.values else "tie_word_embeddings"
    feed_forward = mlp(_inner_columns(reader))
    return ModelConfig(
        vocab_size=reader.integer("vocab_size", 65536),
        hidden_size=hidden_size,
        mixers=mixers,
        feed_forwards=("mlp",) * len(mixers),
        blocks={
            "short_conv": (
                SubBlock("operator_norm", "conv", ShortConv(hidden_size, reader.integer("conv_L_cache", 3, minimum=2))),
            ),
            "attention": (SubBlock("operator_norm", "self_attn", attention),),
            "mlp": (SubBlock("ffn_norm", "feed_forward", feed_forward),),
        },
        norm_eps=reader.number("norm_eps", 1e-5),
        tie_word_embeddings=reader.flag(ties, True),
        context_length=reader.integer("max_position_embeddings", 128000),
        fields={"intermediate_size": feed_forward.columns},
    )


def _mixers(reader: ConfigReader) -> tuple[str, ...]:
    """Return the kind of each layer's mixer, from layer_types or else full_attn_idxs."""
    layers = reader.integer("num_hidden_layers", 32, maximum=MOST_LAYERS)
    mixers = reader.layer_types(layers, _MIXER_OF_TYPE, "layer_types")
    if mixers is None:
        places = reader.places("full_attn_idxs", layers)
        mixers = tuple("attention" if i in places else "short_conv" for i in range(layers))
    reader.require_state(mixers, "conv")
    return mixers


def _inner_columns(reader: ConfigReader) -> int:
    """Return the inner columns of the MLP. By default they are two thirds of the size in the file, times a factor,
    rounded up to a multiple."""
    key = "block_ff_dim" if "block_ff_dim" in reader.values else "intermediate_size"
    columns = reader.integer(key, 12288)
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return columns
    columns = int(2 * columns / 3)
    factor, multiple = reader.number("block_ffn_dim_multiplier", 1.0), reader.integer("block_multiple_of", 256)
    if not 1 <= factor * columns <= LARGEST_SIZE - multiple:
        raise reader.wrong("block_ffn_dim_multiplier", factor, f"a factor that takes {columns} to 1 or more columns")
    return multiple * -(-int(factor * columns) // multiple)


def mlp(columns: int) -> Mlp:
    """Return an MLP or expert with the names of LFM2's projections."""
    return Mlp(columns, ("w1", "w3"), "w2")


FAMILY = Family(
    model_type="lfm2",
    architectures=("Lfm2ForCausalLM",),
    read=read,
    final_norm="model.embedding_norm",
    rank=8,
)
