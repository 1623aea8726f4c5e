"""Gated delta net and Mamba-2 mixers on a CUDA device, composed of the ops: see apcbatch.kernels.cpu.head_mixer.

The recurrence runs in float32 with the state in registers, token by token, so a row's bits do not depend on how a
sequence was cut or on the rest of the batch. A mixer's constants are packed once, when it is made.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import DTYPE_CODES, FLOAT32, address, require_slots, slot_stride, view
from apcbatch.kernels.cuda.batch import DeviceBatch, batch_on
from apcbatch.kernels.cuda.extension import current_stream, extension
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
        w = weights
        self._norm, self._weights, self._conv, self._state = norm, w, conv, state
        self._value_heads, self._values = w.A.numel(), w.out_proj.in_features
        self._channels = w.conv_weight.shape[0]
        is_ssd = isinstance(w, Mamba2Weights)
        self._conv_bias = w.conv_bias if isinstance(w, Mamba2Weights) else None
        key_heads = w.groups if isinstance(w, Mamba2Weights) else w.key_heads
        # heads that are normed alone: in Mamba-2 the columns of a group
        self._normed_heads = key_heads if is_ssd else self._value_heads
        key_dim = (self._channels - self._values) // (2 * key_heads)
        value_dim, lanes = self._values // self._value_heads, state.shape[-1]
        shape = self._value_heads, value_dim // lanes, key_dim, lanes
        limits = w.dt_limits if isinstance(w, Mamba2Weights) else (0.0, 0.0)
        self._params = extension().HeadScanParams(
            dtype=DTYPE_CODES[w.in_proj.dtype],
            key_heads=key_heads,
            value_heads=self._value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            lanes=lanes,
            A=w.A.data_ptr(),
            dt_bias=w.dt_bias.data_ptr(),
            D=address(w.D if isinstance(w, Mamba2Weights) else None),
            dt_min=limits[0],
            dt_max=limits[1],
            state=(state.data_ptr(), slot_stride(state, shape, torch.float32, state.device), FLOAT32),
        )

    def __call__(self, residual: Residual, ragged: Ragged | DeviceBatch) -> None:
        batch, w = batch_on(residual.sum.device, ragged), self._weights
        require_slots(batch.max_slot, self._state.shape[0])
        h = ops.normed(residual, self._norm, w.in_proj.dtype)
        projected = ops.linear(h, w.in_proj)  # (t, h) -> q, k, v, z and gates
        x = ops.causal_conv(projected[:, : self._channels], w.conv_weight, self._conv_bias, self._conv, batch)
        y = self.scan(x, projected[:, self._channels + self._values :], batch)
        y = self.gated_norm(y, projected[:, self._channels : self._channels + self._values])
        ops.leave(residual, y, w.out_proj)  # (t, Hv V) -> (t, h)

    def list_launches(self, program: Program) -> None:
        """See apcbatch.kernels.cuda.program.Listed."""
        w, launches, dtype = self._weights, program.launches, self._weights.in_proj.dtype
        channels, values = self._channels, self._values
        program.keeps(self._state)
        projected = program.product(program.normed(self._norm, dtype), w.in_proj)
        x = program.convolved(projected, w.conv_weight, self._conv_bias, self._conv)
        memory = program.rows(extension().head_scan_bytes(self._params, 1) // 4, torch.float32)
        y, gates = program.rows(values, torch.float32), projected.columns(channels + values)
        launches.scan_heads(self._params, x.given, gates.given, memory.given, y.given)
        normed, gate = program.rows(values, dtype), projected.columns(channels)
        heads, columns, *norm = self._gated_norm
        launches.gate(heads, columns, *norm, y.given, gate.given, normed.given)
        program.leave(normed, w.out_proj)

    @property
    def _gated_norm(self) -> tuple[int, int, int, int, float, bool]:
        """Return the gated norm's parameters: heads, columns of each, address and stride of the weight, eps, and
        gate_first."""
        w, columns = self._weights, self._values // self._normed_heads
        stride, gate_first = (columns, w.gate_first) if isinstance(w, Mamba2Weights) else (0, False)
        return self._normed_heads, columns, address(w.norm), stride, w.norm_eps, gate_first

    def scan(self, x: torch.Tensor, gates: torch.Tensor, batch: DeviceBatch, own: int = 0) -> torch.Tensor:
        """Run the recurrence. x: (t, c), columns of q, k, v. gates: (t, 2 Hv), columns of b, a; in Mamba-2 (t, H), of
        dt. own: columns of a thread, 1, 2 or 4; 0: chosen. Returns o, (t, Hv V) float32."""
        out = torch.empty((batch.num_tokens, self._values), dtype=torch.float32, device=x.device)
        size = extension().head_scan_bytes(self._params, batch.num_tokens)
        memory = torch.empty(size, dtype=torch.uint8, device=x.device)
        views = view(x, "x"), view(gates, "gates")
        with torch.cuda.device(x.device):
            extension().head_scan(
                self._params, batch.params, *views, memory.data_ptr(), out.data_ptr(), own, current_stream()
            )
        return out

    def gated_norm(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Compute the gated RMS norm over the columns of each head, in Mamba-2 over those of each group: see
        apcbatch.kernels.cpu.head_scan. x: (t, Hv V) float32 contiguous. gate: (t, Hv V). Returns (t, Hv V) in gate's
        dtype."""
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        heads, columns, *norm = self._gated_norm
        views = view(x, "x"), view(gate, "gate"), *norm, view(y, "y")
        with torch.cuda.device(x.device):
            extension().gated_norm(len(x), heads, columns, *views, current_stream())
        return y
