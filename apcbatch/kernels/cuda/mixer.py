"""The Mamba-1 mixer of a layer on a CUDA device, made of the ops: see apcbatch.kernels.cpu.mixer.

Must not know: models, checkpoints, the other layers.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.cuda.batch import DeviceBatch
from apcbatch.kernels.cuda.linear import DeviceLinear, linear
from apcbatch.kernels.cuda.norm import rms_norm
from apcbatch.kernels.cuda.residual import normed
from apcbatch.kernels.cuda.scan import causal_conv, selective_scan
from apcbatch.kernels.layer import MixerWeights, PreNorm, Residual
from apcbatch.kernels.ragged import Ragged


class DeviceMixer:
    """The Mamba mixer of a layer, over the slots of its states: see apcbatch.kernels.cpu.mixer."""

    def __init__(
        self, norm: PreNorm, weights: MixerWeights[DeviceLinear], ssm: torch.Tensor, conv: torch.Tensor
    ) -> None:
        self.norm, self.weights, self.ssm, self.conv = norm, weights, ssm, conv

    def __call__(self, residual: Residual, batch: Ragged | DeviceBatch) -> None:
        w = self.weights
        n, d = w.A.shape
        r, dtype = w.dt_proj.in_features, w.in_proj.dtype
        xz = linear(normed(residual, self.norm, dtype), w.in_proj, bias=w.in_bias)  # (t, h) -> (t, 2d)
        x = causal_conv(xz[:, :d], w.conv_weight, w.conv_bias, self.conv, batch)
        dbc = linear(x, w.x_proj)  # (t, d) -> (t, r + 2n)
        dt, b, c = dbc[:, :r], dbc[:, r : r + n], dbc[:, r + n :]
        if w.norms is not None:
            dt, b, c = (rms_norm(part, norm, w.norm_eps, dtype) for part, norm in zip((dt, b, c), w.norms, strict=True))
        dt = linear(dt, w.dt_proj)  # (t, r) -> (t, d)
        y = selective_scan(x, dt, w.A, b, c, w.D, xz[:, d:], w.dt_bias, self.ssm, batch)
        residual.leave(linear(y, w.out_proj, out_dtype=torch.float32, bias=w.out_bias))  # (t, d) -> (t, h)
