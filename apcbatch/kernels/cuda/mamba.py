"""Mamba-1 mixer on a CUDA device. Arguments and results: apcbatch.kernels.cpu.mamba.

A mixer runs in a program (apcbatch.kernels.cuda.program), or else op by op, with fused kernels for few sequences.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import FLOAT32, address, slot_stride
from apcbatch.kernels.cuda.batch import DeviceBatch, batch_on
from apcbatch.kernels.cuda.extension import extension
from apcbatch.kernels.cuda.few_rows import ConvolvedProjection, FusedStep
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.ops import ops
from apcbatch.kernels.cuda.program import Program, Rows, is_parameter, require
from apcbatch.kernels.layer import MambaWeights, PreNorm, Residual
from apcbatch.kernels.ragged import Ragged


class DeviceMamba:
    """See apcbatch.kernels.cpu.mamba."""

    can_capture = True

    def __init__(
        self, norm: PreNorm, weights: MambaWeights[DeviceLinear], ssm: torch.Tensor, conv: torch.Tensor
    ) -> None:
        self.norm, self.weights, self.ssm, self.conv = norm, weights, ssm, conv
        convolution = weights.conv_weight, weights.conv_bias, conv
        self._convolved = ConvolvedProjection(weights.in_proj, weights.in_bias, *convolution)
        self._stepped = FusedStep(weights, ssm)

    def __call__(self, residual: Residual, batch: Ragged | DeviceBatch) -> None:
        batch = batch_on(residual.sum.device, batch)
        w = self.weights
        x, z = self._convolved(ops.normed(residual, self.norm, w.in_proj.dtype), batch)  # (t, h) -> (t, d) each
        dt, b, c = self._projected(x)
        y = (self._stepped if self._stepped.takes(batch) else self._scanned)(dt, x, b, c, z, batch)
        residual.leave(ops.linear(y, w.out_proj, out_dtype=torch.float32, bias=w.out_bias))  # (t, d) -> (t, h)

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

    def list_launches(self, program: Program) -> None:
        w, launches, dtype, device = self.weights, program.launches, self.weights.in_proj.dtype, program.device
        (n, d), r = w.A.shape, w.dt_proj.in_features
        require(w.in_bias is None and w.out_bias is None)
        require(1 <= n <= extension().MOST_STATES)
        parameters = (w.A, (n, d)), (w.D, (d,)), (w.dt_bias, (d,))
        require(all(is_parameter(tensor, shape, device) for tensor, shape in parameters))
        stride = slot_stride(self.ssm, (n, d), torch.float32, device)
        ssm = self.ssm.data_ptr(), stride, FLOAT32
        program.keeps(self.ssm)
        xz = program.product(program.normed(self.norm, dtype), w.in_proj)
        x = program.convolved(xz, w.conv_weight, w.conv_bias, self.conv)
        low = program.product(x, w.x_proj)
        parts: tuple[Rows, ...] = (low, low.columns(r), low.columns(r + n))  # dt, B, C
        if w.norms is not None:
            sizes = r, n, n
            require(all(is_parameter(norm, (size,), device) for norm, size in zip(w.norms, sizes, strict=True)))
            norms = [(address(norm), w.norm_eps, size) for norm, size in zip(w.norms, sizes, strict=True)]
            normed = tuple(program.rows(size, dtype) for size in sizes)
            launches.norms(norms, [part.given for part in parts], [part.given for part in normed])
            parts = normed
        dt, b, c = program.product(parts[0], w.dt_proj), parts[1].given, parts[2].given
        y, parameters_of_scan = program.rows(d, dtype), (w.A.data_ptr(), w.D.data_ptr(), w.dt_bias.data_ptr())
        launches.scan(*parameters_of_scan, ssm, d, n, x.given, dt.given, b, c, xz.columns(d).given, y.given)
        program.leave(y, w.out_proj)
