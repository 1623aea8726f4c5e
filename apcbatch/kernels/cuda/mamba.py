"""Mamba-1 mixer on a CUDA device. Arguments and results: apcbatch.kernels.cpu.mamba.

A mixer runs as one C++ call that launches all kernels (apcbatch.kernels.cuda.compiled_mamba), or else op by op.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apcbatch.kernels.cuda.batch import DeviceBatch, batch_on
from apcbatch.kernels.cuda.compiled_mamba import CompiledMambaStack, compile_mamba
from apcbatch.kernels.cuda.few_rows import FewRows
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.ops import ops
from apcbatch.kernels.layer import MambaWeights, PreNorm, Residual
from apcbatch.kernels.ragged import Ragged


class DeviceMamba:
    """See apcbatch.kernels.cpu.mamba."""

    can_capture = True

    def __init__(
        self, norm: PreNorm, weights: MambaWeights[DeviceLinear], ssm: torch.Tensor, conv: torch.Tensor
    ) -> None:
        self.norm, self.weights, self.ssm, self.conv = norm, weights, ssm, conv
        self.few_rows = FewRows(weights, ssm, conv)
        self.compiled = compile_mamba(norm, weights, ssm, conv)
        self._compiled_stack = DeviceMambaStack([self])

    def __call__(self, residual: Residual, batch: Ragged | DeviceBatch) -> None:
        batch = batch_on(residual.sum.device, batch)
        if not self._compiled_stack(residual, batch):
            self._one_by_one(residual, batch)

    def _one_by_one(self, residual: Residual, batch: DeviceBatch) -> None:
        """Run the mixer op by op, with fused kernels for few sequences."""
        w, few = self.weights, self.few_rows.takes(batch)
        h = ops.normed(residual, self.norm, w.in_proj.dtype)
        x, z = self.few_rows.convolved(h, batch) if few else self._convolved(h, batch)  # (t, h) -> (t, d) each
        dt, b, c = self._projected(x)
        y = self.few_rows.stepped(dt, x, b, c, z, batch) if few else self._scanned(dt, x, b, c, z, batch)
        residual.leave(ops.linear(y, w.out_proj, out_dtype=torch.float32, bias=w.out_bias))  # (t, d) -> (t, h)

    def _convolved(self, h: torch.Tensor, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        w, d = self.weights, self.weights.A.shape[1]
        xz = ops.linear(h, w.in_proj, bias=w.in_bias)  # (t, h) -> (t, 2d)
        return ops.causal_conv(xz[:, :d], w.conv_weight, w.conv_bias, self.conv, batch), xz[:, d:]

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run x_proj: x (t, d) -> dt (t, r), B and C (t, n), normed if the weights have norms."""
        w, n, r = self.weights, self.weights.A.shape[0], self.weights.dt_proj.in_features
        dbc = ops.linear(x, w.x_proj)  # (t, d) -> (t, r + 2n)
        dt, b, c = dbc[:, :r], dbc[:, r : r + n], dbc[:, r + n :]
        if w.norms is not None:
            dt, b, c = ops.rms_norms((dt, b, c), w.norms, w.norm_eps, x.dtype)
        return dt, b, c

    def _scanned(
        self,
        dt: torch.Tensor,
        x: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        z: torch.Tensor,
        batch: DeviceBatch,
    ) -> torch.Tensor:
        w = self.weights
        dt = ops.linear(dt, w.dt_proj)  # (t, r) -> (t, d)
        return ops.selective_scan(x, dt, w.A, b, c, w.D, z, w.dt_bias, self.ssm, batch)


class DeviceMambaStack:
    """All layers of a model with only Mamba mixers: see BackendOf.layer_stack."""

    def __init__(self, mixers: Sequence[DeviceMamba]) -> None:
        self._few_rows = mixers[0].few_rows
        self._compiled = CompiledMambaStack([mixer.compiled for mixer in mixers])

    def __call__(self, residual: Residual, ragged: Ragged | DeviceBatch) -> bool:
        batch = batch_on(residual.sum.device, ragged)
        return not self._few_rows.takes(batch) and self._compiled(residual, batch)
