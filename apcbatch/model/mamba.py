"""The Mamba-1 mixer of Mamba, Falcon Mamba and Jamba.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752, section 3.2, algorithm
2. torch is imported only when a mixer is loaded. Dimension letters: d d_inner, n d_state, w taps, r dt_rank, h hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apcbatch.layout import CONV, SSM, StatePart
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.sub_blocks import Fused, SubBlockKind

if TYPE_CHECKING:
    import torch

    from apcbatch.kernels.layer import PreNorm
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource

    Norms = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _load(config: ModelConfig, source: TensorSource, norm: PreNorm, state: StateTensors) -> Fused:
    """Load a mixer. state: this layer's ssm (slots, n, d) and conv (slots, w - 1, d)."""
    import torch

    from apcbatch.kernels.layer import MambaWeights

    h, d, n, r = config.hidden_size, config.d_inner, config.d_state, config.dt_rank
    conv_weight = source.take("conv1d.weight", (d, 1, config.d_conv))
    a_log = source.take("A_log", (d, n))
    weights = MambaWeights(
        in_proj=source.packed("in_proj", 2 * d, h),
        x_proj=source.packed("x_proj", r + 2 * n, d),
        dt_proj=source.packed("dt_proj", d, r),
        out_proj=source.packed_output("out_proj", h, d),
        in_bias=source.vector("in_proj.bias", 2 * d) if config.proj_bias else None,
        out_bias=source.vector("out_proj.bias", h) if config.proj_bias else None,
        conv_weight=conv_weight.float().squeeze(1).contiguous(),
        conv_bias=source.vector("conv1d.bias", d) if config.conv_bias else None,
        A=-torch.exp(a_log.float()).t().contiguous(),  # (d, n) -> (n, d)
        D=source.vector("D", d),
        dt_bias=source.vector("dt_proj.bias", d),
        norms=_norms(config, source),
        norm_eps=config.mixer_norm_eps,
    )
    return Fused(source.backend, source.backend.sub_block(MAMBA.name, norm, weights, state[SSM.name], state[CONV.name]))


def _norms(config: ModelConfig, source: TensorSource) -> Norms | None:
    """Return the weights of the RMS norms of dt, B and C, each None if the norms have no weights; None if the family
    has no such norms."""
    if config.mixer_norm == "none":
        return None
    if config.mixer_norm != "weighted":
        return None, None, None
    dt, b, c = (
        source.vector(f"{name}_layernorm.weight", size)
        for name, size in (("dt", config.dt_rank), ("b", config.d_state), ("c", config.d_state))
    )
    return dt, b, c


def _state(config: ModelConfig, layer: int, dtype: str) -> tuple[StatePart, ...]:
    return (
        SSM.part(layer, (config.d_state, config.d_inner), dtype),
        CONV.part(layer, (config.d_conv - 1, config.d_inner), dtype),
    )


def _sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d = config.d_inner
    return {"A_log": (d, config.d_state), "conv1d.weight": (d, 1, config.d_conv)}


MAMBA = SubBlockKind("mamba", _load, _state, _sizes)
