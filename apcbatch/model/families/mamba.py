"""Mamba: a stack of Mamba-1 mixers and nothing else. Gu and Dao, arXiv 2312.00752."""

from __future__ import annotations

from apcbatch.model.family import Family
from apcbatch.model.hf_config import MOST_LAYERS, ConfigReader, ModelConfig
from apcbatch.model.mamba import Mamba, MixerNorm
from apcbatch.model.sub_blocks import SubBlock


def read(reader: ConfigReader, mixer_norm: MixerNorm = "none") -> ModelConfig:
    """Return the ModelConfig of config.json. mixer_norm: the norms on dt, B and C."""
    hidden_size = reader.integer("hidden_size", 768)
    layers = reader.integer("num_hidden_layers", 32, maximum=MOST_LAYERS)
    mixer = Mamba(
        d_inner=reader.integer("intermediate_size", reader.expanded("expand", hidden_size)),
        d_state=reader.integer("state_size", 16),
        d_conv=reader.integer("conv_kernel", 4, minimum=2),
        dt_rank=reader.dt_rank("time_step_rank", hidden_size),
        conv_bias=reader.flag("use_conv_bias", True),
        proj_bias=reader.flag("use_bias", False),
        mixer_norm=mixer_norm,
        mixer_norm_eps=reader.number("mixer_rms_eps", 1e-6),
    )
    return ModelConfig(
        vocab_size=reader.integer("vocab_size", 50280),
        hidden_size=hidden_size,
        mixers=("mamba",) * layers,
        feed_forwards=("none",) * layers,
        blocks={"mamba": (SubBlock("norm", "mixer", mixer),)},
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    model_type="mamba",
    architectures=("MambaForCausalLM",),
    read=read,
    embedding="backbone.embeddings",
    layers="backbone.layers",
    final_norm="backbone.norm_f",
    # mamba_ssm's name of the tensor, which transformers accepts too.
    former_names={"backbone.embedding.weight": "backbone.embeddings.weight"},
    rank=0,
)
