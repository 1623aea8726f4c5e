"""Qwen3.5 and its dense successors: each layer has a gated delta net, or periodically gated attention, and then an MLP.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464; Qiu et al., "Gated Attention for Large Language
Models", arXiv 2505.06708. Only the text model of a multimodal checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

from apcbatch.model.attention import Attention
from apcbatch.model.delta_net import DeltaNet
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import Mlp
from apcbatch.model.hf_config import MOST_LAYERS, ConfigReader, ModelConfig
from apcbatch.model.rotary import read_rotary
from apcbatch.model.sub_blocks import SubBlock

_MIXER_OF_TYPE = {
    "linear_attention": "delta",
    "full_attention": "attention",
    "attention": "attention",  # the name before transformers 5
}


def read(whole: ConfigReader, defaults: Mapping[str, int] = {}, is_grouped: bool = False) -> ModelConfig:
    """Return the ModelConfig of config.json. defaults: values for missing keys that are not Qwen3.5's. is_grouped: see
    DeltaNet."""
    reader = whole.text_model().with_defaults(defaults)
    _check_choices(reader)
    heads, kv_heads = reader.integer("num_attention_heads", 16), reader.integer("num_key_value_heads", 4)
    key_heads, value_heads = reader.integer("linear_num_key_heads", 16), reader.integer("linear_num_value_heads", 32)
    reader.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    reader.require_multiple("linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads)
    mixers = _mixers(reader)
    head_dim = reader.integer("head_dim", 256)
    attention = Attention(
        heads,
        kv_heads,
        head_dim,
        read_rotary(reader, head_dim, default_factor=0.25),
        norms=("q_norm", "k_norm"),
        norm_offset=1.0,
        is_gated=True,
    )
    delta_net = DeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=reader.integer("linear_key_head_dim", 128),
        value_dim=reader.integer("linear_value_head_dim", 128),
        d_conv=reader.integer("linear_conv_kernel_dim", 4, minimum=2),
        is_grouped=is_grouped,
    )
    mlp = Mlp(reader.integer("intermediate_size", 12288))
    ties = whole if "tie_word_embeddings" in whole.values else reader
    return ModelConfig(
        vocab_size=reader.integer("vocab_size", 248320),
        hidden_size=reader.integer("hidden_size", 4096),
        mixers=mixers,
        feed_forwards=("mlp",) * len(mixers),
        blocks={
            "delta": (SubBlock("input_layernorm", "linear_attn", delta_net),),
            "attention": (SubBlock("input_layernorm", "self_attn", attention),),
            "mlp": (SubBlock("post_attention_layernorm", "mlp", mlp),),
        },
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=ties.flag("tie_word_embeddings", False),
        context_length=reader.integer("max_position_embeddings", 32768),
        fields={"intermediate_size": mlp.columns},
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


FAMILY = Family(
    model_type="qwen3_5",
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    model_types=("qwen3_5_text",),
    read=read,
    prefixes={"model.language_model.": "model."},
    ignored=("mtp.", "model.visual."),
    norm_offset=1.0,
    rank=3,
)
