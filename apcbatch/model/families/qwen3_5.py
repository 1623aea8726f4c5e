"""Qwen3.5 and its dense successors: each layer has a gated delta net, or periodically gated attention, and then an MLP.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464; Qiu et al., "Gated Attention for Large Language
Models", arXiv 2505.06708. Only the text model of a multimodal checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from apcbatch.model.attention import GATED_ATTENTION
from apcbatch.model.delta_net import DELTA_NET
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import MLP
from apcbatch.model.hf_config import MOST_LAYERS, ConfigReader, ModelConfig
from apcbatch.model.rotary import read_rotary
from apcbatch.model.sub_blocks import SubBlock

_MIXER_OF_TYPE = {
    "linear_attention": "delta",
    "full_attention": "attention",
    "attention": "attention",  # the name before transformers 5
}


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(ModelConfig):
    """ModelConfig with the sizes of the delta nets and the rotary position embedding. rotary_dim: rotated columns of an
    attention head. rope_theta: base of the embedding's wavelengths."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rotary_dim: int
    rope_theta: float


def read(whole: ConfigReader, family: str, defaults: Mapping[str, int] = {}) -> Qwen35Config:
    """Return the ModelConfig of config.json. defaults: values for missing keys that are not Qwen3.5's."""
    reader = whole.text_model().with_defaults(defaults)
    _check_choices(reader)
    heads, kv_heads = reader.integer("num_attention_heads", 16), reader.integer("num_key_value_heads", 4)
    key_heads, value_heads = reader.integer("linear_num_key_heads", 16), reader.integer("linear_num_value_heads", 32)
    reader.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    reader.require_multiple("linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads)
    mixers = _mixers(reader)
    head_dim = reader.integer("head_dim", 256)
    rotary = read_rotary(reader, head_dim, default_factor=0.25)
    ties = whole if "tie_word_embeddings" in whole.values else reader
    return Qwen35Config(
        family=family,
        vocab_size=reader.integer("vocab_size", 248320),
        hidden_size=reader.integer("hidden_size", 4096),
        mixers=mixers,
        feed_forwards=("mlp",) * len(mixers),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=ties.flag("tie_word_embeddings", False),
        intermediate_size=reader.integer("intermediate_size", 12288),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        context_length=reader.integer("max_position_embeddings", 32768),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=reader.integer("linear_key_head_dim", 128),
        linear_value_head_dim=reader.integer("linear_value_head_dim", 128),
        linear_conv_kernel_dim=reader.integer("linear_conv_kernel_dim", 4, minimum=2),
        rotary_dim=rotary.dim,
        rope_theta=rotary.theta,
    )


def _check_choices(reader: ConfigReader) -> None:
    """Raise ModelError for a choice that is not implemented."""
    reader.activation()
    reader.require("attention_bias", False, False)
    reader.require("attn_output_gate", True, True)
    reader.require("mamba_ssm_dtype", "float32", "float32")
    reader.require("mlp_only_layers", [], [], None)


def _mixers(reader: ConfigReader) -> tuple[str, ...]:
    """Return the kind of each layer's mixer, from layer_types or else full_attention_interval."""
    layers = reader.integer("num_hidden_layers", 32, maximum=MOST_LAYERS)
    mixers = reader.layer_types(layers, _MIXER_OF_TYPE, "layer_types")
    if mixers is None:
        interval = reader.integer("full_attention_interval", 4)
        mixers = tuple("delta" if (i + 1) % interval else "attention" for i in range(layers))
    reader.require_state(mixers)
    return mixers


MIXERS = {
    "delta": SubBlock("input_layernorm", "linear_attn", DELTA_NET),
    "attention": SubBlock("input_layernorm", "self_attn", GATED_ATTENTION),
}

FAMILY = Family(
    model_type="qwen3_5",
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    model_types=("qwen3_5_text",),
    read=read,
    embedding="model.embed_tokens",
    layers="model.layers",
    final_norm="model.norm",
    layer=lambda config, i: (MIXERS[config.mixers[i]], SubBlock("post_attention_layernorm", "mlp", MLP)),
    prefixes={"model.language_model.": "model."},
    ignored=("mtp.", "model.visual."),
    norm_offset=1.0,
    rank=3,
)
