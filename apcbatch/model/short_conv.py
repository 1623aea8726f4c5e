"""The gated short convolution of LFM2, a mixer whose state is its last inputs alone.

Liquid AI, "LFM2 Technical Report", arXiv 2511.23404. torch is imported only when a mixer is loaded. The convolution
runs over the hidden columns; its taps are d_conv of the config, w.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apcbatch.layout import CONV, StatePart
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.sub_blocks import Fused, SubBlockKind

if TYPE_CHECKING:
    from apcbatch.kernels.layer import PreNorm
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource


def _load(config: ModelConfig, source: TensorSource, norm: PreNorm, state: StateTensors) -> Fused:
    """Load a mixer. state: this layer's conv (slots, w - 1, h)."""
    from apcbatch.kernels.layer import ShortConvWeights

    h = config.hidden_size
    weights = ShortConvWeights(
        in_proj=source.packed("in_proj", 3 * h, h),
        out_proj=source.packed_output("out_proj", h, h),
        conv_weight=source.take("conv.weight", (h, 1, config.d_conv)).float().squeeze(1).contiguous(),
    )
    return Fused(source.backend, source.backend.sub_block(SHORT_CONV.name, norm, weights, state[CONV.name]))


def _state(config: ModelConfig, layer: int, dtype: str) -> tuple[StatePart, ...]:
    return (CONV.part(layer, (config.d_conv - 1, config.hidden_size), dtype),)


def _sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {"conv.weight": (config.hidden_size, 1, config.d_conv)}


SHORT_CONV = SubBlockKind("short_conv", _load, _state, _sizes)
