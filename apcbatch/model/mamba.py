"""The Mamba-1 mixer of all three families.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752, section 3.2,
algorithm 2. Must not know: requests, the layers around it.
Dimension letters: t tokens, d d_inner, n d_state, r dt_rank, h hidden.
"""

from __future__ import annotations

import torch

from apcbatch.kernels import ops
from apcbatch.model.batch import Batch
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.weights import Checkpoint


class MambaMixer:
    """normed (t, h) -> (t, h) float32, reading and writing the states that the batch names."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: torch.dtype,
        ssm: torch.Tensor,
        conv: torch.Tensor,
    ) -> None:
        h, d, n, r = config.hidden_size, config.d_inner, config.d_state, config.dt_rank
        take = checkpoint.take
        self.d_inner, self.d_state, self.dt_rank = d, n, r
        self.dtype = dtype
        self.in_proj = ops.pack_linear(take(f"{prefix}.in_proj.weight", (2 * d, h)).to(dtype))
        self.x_proj = ops.pack_linear(take(f"{prefix}.x_proj.weight", (r + 2 * n, d)).to(dtype))
        self.dt_proj = ops.pack_linear(take(f"{prefix}.dt_proj.weight", (d, r)).to(dtype))
        self.out_proj = ops.pack_linear(take(f"{prefix}.out_proj.weight", (h, d)).to(dtype))
        self.in_bias = take(f"{prefix}.in_proj.bias", (2 * d,)).float() if config.proj_bias else None
        self.out_bias = take(f"{prefix}.out_proj.bias", (h,)).float() if config.proj_bias else None
        self.conv_weight = (
            take(f"{prefix}.conv1d.weight", (d, 1, config.d_conv)).float().squeeze(1).contiguous()
        )
        self.conv_bias = take(f"{prefix}.conv1d.bias", (d,)).float() if config.conv_bias else None
        self.dt_bias = take(f"{prefix}.dt_proj.bias", (d,)).float()
        self.A = -torch.exp(take(f"{prefix}.A_log", (d, n)).float()).t().contiguous()  # (n, d)
        self.D = take(f"{prefix}.D", (d,)).float()
        self.norms = self._norms(config, checkpoint, prefix)
        self.mixer_norm = config.mixer_norm
        self.norm_eps = config.mixer_norm_eps
        self.ssm, self.conv = ssm, conv  # this layer's slots: (slots, n, d), (slots, w - 1, d)

    def _norms(
        self, config: ModelConfig, checkpoint: Checkpoint, prefix: str
    ) -> tuple[torch.Tensor | None, ...]:
        """Weights of the norms on dt, B and C, where the family has them."""
        if config.mixer_norm != "weighted":
            return (None, None, None)
        sizes = {"dt": config.dt_rank, "b": config.d_state, "c": config.d_state}
        return tuple(
            checkpoint.take(f"{prefix}.{k}_layernorm.weight", (size,)).float() for k, size in sizes.items()
        )

    def __call__(self, normed: torch.Tensor, batch: Batch) -> torch.Tensor:
        d, n, r = self.d_inner, self.d_state, self.dt_rank
        xz = ops.linear(normed, self.in_proj, bias=self.in_bias)  # (t, h) -> (t, 2d)
        x = ops.causal_conv(xz[:, :d], self.conv_weight, self.conv_bias, self.conv, batch.ragged)
        dbc = ops.linear(x, self.x_proj)  # (t, d) -> (t, r + 2n)
        dt, b, c = dbc[:, :r], dbc[:, r : r + n], dbc[:, r + n :]
        if self.mixer_norm != "none":
            dt, b, c = (
                ops.rms_norm(part, weight, self.norm_eps, self.dtype)
                for part, weight in zip((dt, b, c), self.norms, strict=True)
            )
        dt = ops.linear(dt, self.dt_proj)  # (t, r) -> (t, d)
        y = ops.selective_scan(x, dt, self.A, b, c, self.D, xz[:, d:], self.dt_bias, self.ssm, batch.ragged)
        return ops.linear(y, self.out_proj, out_dtype=torch.float32, bias=self.out_bias)  # (t, d) -> (t, h)
