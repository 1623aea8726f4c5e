"""Falcon-H1: each layer has a Mamba-2 mixer in parallel with rotary attention, under one norm, and then an MLP. Zuo et
al., "Falcon-H1", arXiv 2507.22448.

Embeddings, logits, and parts of products in each layer have multipliers, in the manner of Yang et al., "Tensor Programs
V", arXiv 2203.03466.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from apcbatch.model.attention import Attention
from apcbatch.model.families.mamba2 import read_mixer
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import Mlp
from apcbatch.model.hf_config import MOST_LAYERS, ConfigReader, ModelConfig, Multipliers
from apcbatch.model.rotary import read_whole_rotary
from apcbatch.model.sub_blocks import SubBlock


@dataclass(frozen=True, kw_only=True)
class FalconH1Multipliers(Multipliers):
    """Multipliers of the model and of parts of its layers, named as in config.json. ssm: of z, x, B, C and dt. mlp: of
    an MLP's gate and output."""

    ssm: tuple[float, ...]
    ssm_in: float
    ssm_out: float
    attention_in: float
    attention_out: float
    key: float
    mlp: tuple[float, ...]

    @property
    def parts(self) -> Mapping[str, float]:
        """See Multipliers. A factor of a product's input is applied to the product's results."""
        return {
            **{name: self.ssm_in * factor for name, factor in zip(("z", "x", "B", "C", "dt"), self.ssm, strict=True)},
            "out_proj": self.ssm_out,
            "q": self.attention_in,
            "k": self.attention_in * self.key,
            "v": self.attention_in,
            "o_proj": self.attention_out,
            "gate": self.mlp[0],
            "down_proj": self.mlp[1],
        }


def read(reader: ConfigReader) -> ModelConfig:
    for bias in ("attention_bias", "mamba_proj_bias", "mlp_bias", "projectors_bias"):
        reader.require(bias, False, False)
    reader.require("mamba_use_mlp", True, True)
    hidden_size = reader.integer("hidden_size", 4096)
    layers = reader.integer("num_hidden_layers", 32, maximum=MOST_LAYERS)
    heads = reader.integer("num_attention_heads", 32)
    kv_heads = reader.kv_heads(heads, default=8)
    head_dim = reader.head_dim(hidden_size, heads)
    attention = Attention(heads, kv_heads, head_dim, read_whole_rotary(reader, head_dim))
    has_size = reader.values.get("mamba_d_ssm", 1024) is not None
    d_inner = reader.integer("mamba_d_ssm", 1024) if has_size else reader.expanded("mamba_expand", hidden_size)
    has_norm = reader.flag("mamba_rms_norm", False)
    is_first = reader.flag("mamba_norm_before_gate", True)
    mamba2 = read_mixer(reader, d_inner, "no_norm" if not has_norm else "norm_first" if is_first else "gate_first")
    mlp = Mlp(reader.integer("intermediate_size", 14336))
    multipliers = FalconH1Multipliers(
        embedding=reader.number("embedding_multiplier", 1.0),
        logits=reader.number("lm_head_multiplier", 1.0),
        ssm=reader.numbers("ssm_multipliers", 5),
        ssm_in=reader.number("ssm_in_multiplier", 1.0),
        ssm_out=reader.number("ssm_out_multiplier", 1.0),
        attention_in=reader.number("attention_in_multiplier", 1.0),
        attention_out=reader.number("attention_out_multiplier", 1.0),
        key=reader.number("key_multiplier", 1.0),
        mlp=reader.numbers("mlp_multipliers", 2),
    )
    return ModelConfig(
        vocab_size=reader.integer("vocab_size", 128000),
        hidden_size=hidden_size,
        mixers=("hybrid",) * layers,
        feed_forwards=("mlp",) * layers,
        blocks={
            "hybrid": (
                SubBlock("input_layernorm", "mamba", mamba2),
                SubBlock("input_layernorm", "self_attn", attention),
            ),
            "mlp": (SubBlock("pre_ff_layernorm", "feed_forward", mlp),),
        },
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        context_length=reader.integer("max_position_embeddings", 8192),
        multipliers=multipliers,
        fields={
            "intermediate_size": mlp.columns,
            "mamba_rms_norm": has_norm,
            "mamba_norm_before_gate": is_first,
            "multipliers": asdict(multipliers),
        },
    )


FAMILY = Family(
    model_type="falcon_h1",
    architectures=("FalconH1ForCausalLM",),
    read=read,
    final_norm="model.final_layernorm",
    rank=7,
)
