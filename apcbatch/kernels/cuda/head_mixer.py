"""Gated delta net and Mamba-2 mixers on a CUDA device, composed of the ops: see apcbatch.kernels.cpu.head_mixer.

The recurrence runs in float32 with the state in registers, token by token, so a row's bits do not depend on how a
sequence was cut or on the rest of the batch. A mixer's constants are packed once, when it is made.
"""

from __future__ import annotations

from typing import Any

import torch

from apcbatch.kernels.arguments import address, head_scan_params
from apcbatch.kernels.cuda.batch import DeviceBatch, batch_on
from apcbatch.kernels.cuda.extension import extension
from apcbatch.kernels.cuda.few_rows import ConvolvedProjection
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.ops import ops
from apcbatch.kernels.cuda.program import Program
from apcbatch.kernels.layer import DeltaNetWeights, Mamba2Weights, PreNorm, Residual
from apcbatch.kernels.ragged import Ragged


class DeviceHeadMixer:
    """See apcbatch.kernels.cpu.head_mixer.FusedHeadMixer. state and conv are on the device."""

    can_capture = True

    def __init__(
        self,
        norm: PreNorm,
        weights: DeltaNetWeights[DeviceLinear] | Mamba2Weights[DeviceLinear],
        state: torch.Tensor,
        conv: torch.Tensor,
    ) -> None:
        self._norm, self._weights, self._conv, self._state = norm, weights, conv, state
        self._channels, self._values = weights.conv_weight.shape[0], weights.out_proj.in_features
        # key_heads; heads that are normed alone: in Mamba-2 the columns of a group
        if isinstance(weights, Mamba2Weights):
            self._conv_bias, self._gate_first = weights.conv_bias, weights.gate_first
            self._key_heads = self._normed_heads = weights.groups
            self._rule: tuple[Any, ...] = weights.D, weights.dt_limits
        else:
            self._conv_bias, self._gate_first, self._rule = None, False, ()
            self._key_heads, self._normed_heads = weights.key_heads, weights.A.numel()
        self._convolved = ConvolvedProjection(weights.in_proj, None, weights.conv_weight, self._conv_bias, conv)

    def __call__(self, residual: Residual, ragged: Ragged | DeviceBatch) -> None:
        batch, w, values = batch_on(residual.sum.device, ragged), self._weights, self._values
        h = ops.normed(residual, self._norm, w.in_proj.dtype)
        x, rest = self._convolved(h, batch)  # (t, h) -> q, k and v; z and gates
        state = w.A, w.dt_bias, self._state
        y = ops.head_scan(x, rest[:, values:], self._key_heads, *state, batch, *self._rule)
        y = ops.gated_norm(y, rest[:, :values], self._normed_heads, w.norm, w.norm_eps, self._gate_first)
        ops.leave(residual, y, w.out_proj)  # (t, Hv V) -> (t, h)

    def list_launches(self, program: Program) -> None:
        w, launches, dtype = self._weights, program.launches, self._weights.in_proj.dtype
        channels, values = self._channels, self._values
        program.keeps(self._state)
        projected = program.product(program.normed(self._norm, dtype), w.in_proj)
        x = program.convolved(projected, w.conv_weight, self._conv_bias, self._conv)
        sizes = (self._key_heads, self._state.shape[3]), (w.A.numel(), values // w.A.numel())
        params = head_scan_params(extension(), dtype, *sizes, w.A, w.dt_bias, self._state, *self._rule)
        memory = program.rows(extension().head_scan_bytes(params, 1) // 4, torch.float32)
        y, gates = program.rows(values, torch.float32), projected.columns(channels + values)
        launches.scan_heads(params, x.given, gates.given, memory.given, y.given)
        normed, gate = program.rows(values, dtype), projected.columns(channels)
        columns = values // self._normed_heads
        norm = address(w.norm), columns if self._rule else 0, w.norm_eps, self._gate_first
        launches.gate(self._normed_heads, columns, *norm, y.given, gate.given, normed.given)
        program.leave(normed, w.out_proj)
