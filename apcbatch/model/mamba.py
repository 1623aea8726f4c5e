"""The Mamba-1 mixer of all three families.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752, section 3.2,
algorithm 2. Must not know: requests, the layers around it.
Dimension letters: d d_inner, n d_state, r dt_rank, h hidden.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.layer import MixerWeights, PreNorm, Residual
from apcbatch.model.batch import Batch
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.tensor_source import TensorSource

Norms = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class MambaMixer:
    """Norms the residual (t, h) and leaves (t, h) to be added to it, over the states that the batch names.

    norm: the layer's, which it begins with. ssm (slots, n, d) and conv (slots, w - 1, d): this layer's slots. part: the
    mixer as the kernels have it.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        norm: PreNorm,
        ssm: torch.Tensor,
        conv: torch.Tensor,
    ) -> None:
        h, d, n, r = config.hidden_size, config.d_inner, config.d_state, config.dt_rank
        conv_weight = source.take("conv1d.weight", (d, 1, config.d_conv))
        a_log = source.take("A_log", (d, n))
        weights = MixerWeights(
            in_proj=source.packed("in_proj", 2 * d, h),
            x_proj=source.packed("x_proj", r + 2 * n, d),
            dt_proj=source.packed("dt_proj", d, r),
            out_proj=source.packed("out_proj", h, d),
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
        self._backend, self.part = source.backend, source.backend.mixer(norm, weights, ssm, conv)

    def __call__(self, residual: Residual, batch: Batch) -> None:
        self._backend.run_mixer(self.part, residual, batch.ragged)


def _norms(config: ModelConfig, source: TensorSource) -> Norms | None:
    """Weights of the norms on dt, B and C, where the family has them."""
    if config.mixer_norm == "none":
        return None
    if config.mixer_norm != "weighted":
        return None, None, None
    dt, b, c = (
        source.vector(f"{name}_layernorm.weight", size)
        for name, size in (("dt", config.dt_rank), ("b", config.d_state), ("c", config.d_state))
    )
    return dt, b, c
