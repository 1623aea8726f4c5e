"""Qwen3-Next: the layers of Qwen3.5 with experts, with the projections of the delta nets grouped by key head."""

from __future__ import annotations

from dataclasses import replace

from apcbatch.model.families import qwen3_5_moe
from apcbatch.model.hf_config import ConfigReader, ModelConfig

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}


def read(reader: ConfigReader) -> ModelConfig:
    reader.require("decoder_sparse_step", 1, 1)
    return qwen3_5_moe.read(reader, _DEFAULTS, is_grouped=True)


FAMILY = replace(
    qwen3_5_moe.FAMILY,
    model_type="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    model_types=(),
    read=read,
    prefixes={},
    ignored=("mtp.",),
)
