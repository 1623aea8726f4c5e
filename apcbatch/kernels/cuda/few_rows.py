"""Run a mixer's in_proj with its convolution, and a Mamba mixer's dt_proj with the step of its states, in one launch
each: for decode passes of few sequences on a CUDA device.

Invariant: the bits equal those of the product and the op run separately.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import DTYPE_CODES, FLOAT32, address, require_slots, slot_stride
from apcbatch.kernels.cuda.batch import DeviceBatch
from apcbatch.kernels.cuda.extension import current_stream, extension
from apcbatch.kernels.cuda.fixed_order import product_of
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.ops import ops
from apcbatch.kernels.layer import MambaWeights

MOST_TAPS = 4
STATES = 16
_BFLOAT16 = DTYPE_CODES[torch.bfloat16]


class ConvolvedProjection:
    """Multiply by in_proj (out, h) of a mixer, and convolve the first d columns causally. in_bias: (out,) or None.
    weight: (d, w), bias: (d,) or None, float32, of the convolution. conv: (slots, w - 1, d), its last inputs."""

    def __init__(
        self,
        in_proj: DeviceLinear,
        in_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv: torch.Tensor,
    ) -> None:
        self._in_proj, self._in_bias, self._weight, self._bias, self._conv = in_proj, in_bias, weight, bias, conv
        self._is_supported = _is_fixed_order(in_proj) and in_bias is None and weight.shape[1] <= MOST_TAPS

    def takes(self, batch: DeviceBatch) -> bool:
        """Return True if one launch does both for this batch: few sequences of one token each."""
        return self._is_supported and _has_few_tokens(batch)

    def __call__(self, h: torch.Tensor, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Project h, (t, hidden), by in_proj, and convolve the first d columns of the result. Returns the convolved
        columns, (t, d), and the other ones, (t, out - d). All are of the weights' dtype."""
        d, width = self._weight.shape
        if not self.takes(batch):
            projected = ops.linear(h, self._in_proj, bias=self._in_bias)  # (t, h) -> (t, out)
            return ops.causal_conv(projected[:, :d], self._weight, self._bias, self._conv, batch), projected[:, d:]
        stride = slot_stride(self._conv, (width - 1, d), h.dtype, batch.device)
        require_slots(batch.max_slot, self._conv.shape[0])
        x, rest = h.new_empty((len(h), d)), h.new_empty((len(h), self._in_proj.out_features - d))
        with torch.cuda.device(h.device):
            extension().few_rows_convolution(
                _product_of(h, self._in_proj),
                batch=batch.params,
                weight=self._weight.data_ptr(),
                bias=address(self._bias),
                state=(self._conv.data_ptr(), stride, _BFLOAT16),
                x=(x.data_ptr(), d, _BFLOAT16),
                rest=rest.data_ptr(),
                d_inner=d,
                width=width,
                stream=current_stream(),
            )
        return x, rest


class FusedStep:
    """Multiply by dt_proj of a Mamba mixer, and advance its states by a token. ssm: (slots, n, d) float32, the
    states."""

    def __init__(self, weights: MambaWeights[DeviceLinear], ssm: torch.Tensor) -> None:
        self._weights, self._ssm = weights, ssm
        self._is_supported = _is_fixed_order(weights.dt_proj) and weights.A.shape[0] == STATES

    def takes(self, batch: DeviceBatch) -> bool:
        """Return True if the kernel supports this mixer and this batch: few sequences of one token each."""
        return self._is_supported and _has_few_tokens(batch)

    def __call__(
        self,
        dt: torch.Tensor,
        x: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        z: torch.Tensor,
        batch: DeviceBatch,
    ) -> torch.Tensor:
        """Project dt (t, r), and advance the states. x: (t, d) contiguous. z: (t, d). b, c: (t, n), each row aligned to
        8 bytes. Returns y (t, d). All are bfloat16."""
        w, (n, d) = self._weights, self._weights.A.shape
        stride = slot_stride(self._ssm, (n, d), torch.float32, batch.device)
        require_slots(batch.max_slot, self._ssm.shape[0])
        y = torch.empty_like(x)
        with torch.cuda.device(x.device):
            extension().few_rows_step(
                _product_of(dt, w.dt_proj),
                batch=batch.params,
                x=(x.data_ptr(), d, _BFLOAT16),
                A=w.A.data_ptr(),
                B=(b.data_ptr(), b.stride(0), _BFLOAT16),
                C=(c.data_ptr(), c.stride(0), _BFLOAT16),
                D=w.D.data_ptr(),
                z=(z.data_ptr(), z.stride(0), _BFLOAT16),
                dt_bias=w.dt_bias.data_ptr(),
                state=(self._ssm.data_ptr(), stride, FLOAT32),
                y=(y.data_ptr(), d, _BFLOAT16),
                d_inner=d,
                d_state=n,
                stream=current_stream(),
            )
        return y


def _has_few_tokens(batch: DeviceBatch) -> bool:
    most: int = extension().MOST_MIXER_ROWS
    return batch.num_tokens == batch.num_sequences <= most


def _is_fixed_order(packed: DeviceLinear) -> bool:
    """Return True if products with these weights are bfloat16, in fixed order, with one sum over all inputs, and not
    encoded."""
    is_plain = isinstance(packed.weight, torch.Tensor) and packed.dtype == torch.bfloat16
    return is_plain and packed.fixed_order is not None and packed.pieces == 1


def _product_of(x: torch.Tensor, packed: DeviceLinear) -> object:
    """Return the product of x (t, in) without a result tensor: the fused kernel consumes the result."""
    assert isinstance(packed.weight, torch.Tensor)
    return product_of(x, packed.weight, None, packed.pieces)
