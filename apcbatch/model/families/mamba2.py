"""Mamba-2: a stack of Mamba-2 mixers and nothing else. Dao and Gu, "Transformers are SSMs", arXiv 2405.21060."""

from __future__ import annotations

from dataclasses import replace

from apcbatch.model.families import mamba
from apcbatch.model.hf_config import MOST_LAYERS, ConfigReader, ModelConfig
from apcbatch.model.mamba2 import Gate, Mamba2
from apcbatch.model.sub_blocks import SubBlock


def read(reader: ConfigReader) -> ModelConfig:
    reader.require("use_bias", False, False)
    hidden_size = reader.integer("hidden_size", 4096)
    layers = reader.integer("num_hidden_layers", 64, maximum=MOST_LAYERS)
    heads, head_dim = reader.integer("num_heads", 128), reader.integer("head_dim", 64)
    groups, d_inner = reader.integer("n_groups", 8), reader.expanded("expand", hidden_size)
    if heads * head_dim != d_inner:
        raise reader.wrong("num_heads", heads, f"a number that times head_dim {head_dim} is {d_inner}, the d_inner")
    if heads % groups:
        raise reader.wrong("num_heads", heads, f"a multiple of n_groups, {groups}")
    mixer = Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        d_state=reader.integer("state_size", 128),
        d_conv=reader.integer("conv_kernel", 4, minimum=2),
        conv_bias=reader.flag("use_conv_bias", True),
        time_step_limit=reader.interval("time_step_limit", (0.0, float("inf"))),
    )
    return ModelConfig(
        vocab_size=reader.integer("vocab_size", 32768),
        hidden_size=hidden_size,
        mixers=("mamba2",) * layers,
        feed_forwards=("none",) * layers,
        blocks={"mamba2": (SubBlock("norm", "mixer", mixer),)},
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
    )


def read_mixer(reader: ConfigReader, d_inner: int, gate: Gate = "gate_first") -> Mamba2:
    """Return the mixer of a hybrid, from the keys mamba_*. gate: see Mamba2. Raises ModelError."""
    heads, groups = reader.integer("mamba_n_heads", 128), reader.integer("mamba_n_groups", 1)
    reader.require_multiple("mamba_n_heads", heads, "mamba_n_groups", groups)
    if d_inner % heads:
        raise reader.wrong("mamba_n_heads", heads, f"a divisor of {d_inner}, the d_inner")
    reader.require("mamba_d_head", "auto", d_inner // heads, "auto")
    return Mamba2(
        heads=heads,
        head_dim=d_inner // heads,
        groups=groups,
        d_state=reader.integer("mamba_d_state", 256),
        d_conv=reader.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=reader.flag("mamba_conv_bias", True),
        time_step_limit=reader.interval("time_step_limit", (0.0, float("inf"))),
        gate=gate,
    )


FAMILY = replace(mamba.FAMILY, model_type="mamba2", architectures=("Mamba2ForCausalLM",), read=read, rank=4)
