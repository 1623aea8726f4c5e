"""The Mamba-1 mixer of all three families.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752, section 3.2,
algorithm 2. Must not know: requests, the layers around it.
Dimension letters: d d_inner, n d_state, r dt_rank, h hidden.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.layer import Linear, MixerWeights, PreNorm, Residual
from apcbatch.kernels.ops import Backend
from apcbatch.model.batch import Batch
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.weights import Checkpoint

Norms = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class MambaMixer:
    """Norms the residual (t, h) and leaves (t, h) to be added to it, over the states that the batch names.

    norm: the layer's, which it begins with. ssm (slots, n, d) and conv (slots, w - 1, d): this layer's slots. part: the
    mixer as the kernels have it.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: torch.dtype,
        backend: Backend,
        norm: PreNorm,
        ssm: torch.Tensor,
        conv: torch.Tensor,
    ) -> None:
        h, d, n, r = config.hidden_size, config.d_inner, config.d_state, config.dt_rank

        def vector(name: str, size: int) -> torch.Tensor:
            return checkpoint.take(f"{prefix}.{name}", (size,)).float()

        def packed(name: str, rows: int, columns: int) -> Linear:
            weight = checkpoint.take(f"{prefix}.{name}.weight", (rows, columns))
            linear: Linear = backend.pack_linear(weight.to(dtype))
            return linear

        conv_weight = checkpoint.take(f"{prefix}.conv1d.weight", (d, 1, config.d_conv))
        a_log = checkpoint.take(f"{prefix}.A_log", (d, n))
        weights = MixerWeights(
            in_proj=packed("in_proj", 2 * d, h),
            x_proj=packed("x_proj", r + 2 * n, d),
            dt_proj=packed("dt_proj", d, r),
            out_proj=packed("out_proj", h, d),
            in_bias=vector("in_proj.bias", 2 * d) if config.proj_bias else None,
            out_bias=vector("out_proj.bias", h) if config.proj_bias else None,
            conv_weight=conv_weight.float().squeeze(1).contiguous(),
            conv_bias=vector("conv1d.bias", d) if config.conv_bias else None,
            A=-torch.exp(a_log.float()).t().contiguous(),  # (d, n) -> (n, d)
            D=vector("D", d),
            dt_bias=vector("dt_proj.bias", d),
            norms=_norms(config, checkpoint, prefix),
            norm_eps=config.mixer_norm_eps,
        )
        self._backend, self.part = backend, backend.mixer(norm, weights, ssm, conv)

    def __call__(self, residual: Residual, batch: Batch) -> None:
        self._backend.run_mixer(self.part, residual, batch.ragged)


def _norms(config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> Norms | None:
    """Weights of the norms on dt, B and C, where the family has them."""
    if config.mixer_norm == "none":
        return None
    if config.mixer_norm != "weighted":
        return None, None, None
    dt, b, c = (
        checkpoint.take(f"{prefix}.{name}_layernorm.weight", (size,)).float()
        for name, size in (("dt", config.dt_rank), ("b", config.d_state), ("c", config.d_state))
    )
    return dt, b, c
