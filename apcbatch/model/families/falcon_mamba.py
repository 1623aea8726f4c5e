"""Falcon Mamba: Mamba, with RMS norms without weights on dt, B and C. Zuo et al., arXiv 2410.05355."""

from __future__ import annotations

from dataclasses import replace

from apcbatch.model.families import mamba
from apcbatch.model.hf_config import ConfigReader, ModelConfig


def read(reader: ConfigReader) -> ModelConfig:
    return mamba.read(reader, mixer_norm="weightless")


FAMILY = replace(
    mamba.FAMILY,
    model_type="falcon_mamba",
    architectures=("FalconMambaForCausalLM",),
    read=read,
    rank=1,
)
