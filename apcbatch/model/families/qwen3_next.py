"""Qwen3-Next: the layers of Qwen3.5 with experts, with the projections of the delta nets grouped by key head."""

from __future__ import annotations

from dataclasses import replace

from apcbatch.model.delta_net import GROUPED_DELTA_NET
from apcbatch.model.families import qwen3_5, qwen3_5_moe
from apcbatch.model.families.qwen3_5_moe import Qwen35MoeConfig, experts
from apcbatch.model.hf_config import ConfigReader
from apcbatch.model.sub_blocks import SubBlock

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}


def read(reader: ConfigReader, family: str) -> Qwen35MoeConfig:
    """Return the ModelConfig of config.json."""
    reader.require("decoder_sparse_step", 1, 1)
    return qwen3_5_moe.read(reader, family, _DEFAULTS)


_MIXERS = {**qwen3_5.MIXERS, "delta": SubBlock("input_layernorm", "linear_attn", GROUPED_DELTA_NET)}

FAMILY = replace(
    qwen3_5_moe.FAMILY,
    model_type="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    model_types=(),
    read=read,
    layer=lambda config, i: (_MIXERS[config.mixers[i]], *experts(config)),
    prefixes={},
    ignored=("mtp.",),
)
