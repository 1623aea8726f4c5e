"""Gated short convolutions on a CUDA device, composed of the ops: see apcbatch.kernels.cpu.short_conv."""

from __future__ import annotations

import torch

from apcbatch.kernels.cuda.batch import DeviceBatch, batch_on
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.ops import ops
from apcbatch.kernels.cuda.program import Program
from apcbatch.kernels.layer import PreNorm, Residual, ShortConvWeights
from apcbatch.kernels.ragged import Ragged


class DeviceShortConv:
    """See apcbatch.kernels.cpu.short_conv.FusedShortConv. conv is on the device."""

    can_capture = True

    def __init__(self, norm: PreNorm, weights: ShortConvWeights[DeviceLinear], conv: torch.Tensor) -> None:
        self._norm, self._weights, self._conv = norm, weights, conv

    def __call__(self, residual: Residual, ragged: Ragged | DeviceBatch) -> None:
        batch, w = batch_on(residual.sum.device, ragged), self._weights
        normed = ops.normed(residual, self._norm, w.in_proj.dtype)
        B, C, x = ops.linear(normed, w.in_proj).chunk(3, 1)  # (t, h) -> (t, 3h)
        y = ops.causal_conv(B * x, w.conv_weight, None, self._conv, batch, has_silu=False)
        ops.leave(residual, C * y, w.out_proj)  # (t, h) -> (t, h)

    def list_launches(self, program: Program) -> None:
        w, launches, h = self._weights, program.launches, self._weights.conv_weight.shape[0]
        dtype = w.in_proj.dtype
        projected = program.product(program.normed(self._norm, dtype), w.in_proj)
        B, C, x = projected, projected.columns(h), projected.columns(2 * h)
        product, gated = program.rows(h, dtype), program.rows(h, dtype)
        launches.multiply(h, B.given, x.given, False, product.given)
        y = program.convolved(product, w.conv_weight, None, self._conv, has_silu=False)
        launches.multiply(h, C.given, y.given, False, gated.given)
        program.leave(gated, w.out_proj)
