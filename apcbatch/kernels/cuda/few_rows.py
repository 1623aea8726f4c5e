"""Fused kernels of a Mamba mixer for a decode pass of few sequences on a CUDA device.

One launch runs in_proj and the convolution; another launch runs dt_proj and one step of the states. Invariant: the bits
equal those of the product and the op run separately.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import DTYPE_CODES, FLOAT32, address, require_slots, slot_stride
from apcbatch.kernels.cuda.batch import DeviceBatch
from apcbatch.kernels.cuda.extension import current_stream, extension
from apcbatch.kernels.cuda.fixed_order import product_of
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.layer import MambaWeights

MOST_TAPS = 4
STATES = 16
_BFLOAT16 = DTYPE_CODES[torch.bfloat16]


class FewRows:
    """Fused kernels of one mixer, for few sequences. ssm: (slots, n, d) float32, its recurrent states. conv: (slots,
    w - 1, d) bfloat16, the last inputs of its convolution."""

    def __init__(self, weights: MambaWeights[DeviceLinear], ssm: torch.Tensor, conv: torch.Tensor) -> None:
        self._weights, self._ssm, self._conv = weights, ssm, conv
        self._is_supported = (
            all(_is_fixed_order(part) for part in (weights.in_proj, weights.dt_proj))
            and weights.in_bias is None
            and weights.A.shape[0] == STATES
            and weights.conv_weight.shape[1] <= MOST_TAPS
        )

    def takes(self, batch: DeviceBatch) -> bool:
        """Return True if the fused kernels support this mixer and this batch: few sequences of one token each."""
        return self._is_supported and batch.num_tokens == batch.num_sequences <= extension().MOST_MIXER_ROWS

    def convolved(self, h: torch.Tensor, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run in_proj and the convolution. h: (t, h). Returns x after the convolution, and z, (t, d) each. All are
        bfloat16."""
        w, d = self._weights, self._weights.A.shape[1]
        width = w.conv_weight.shape[1]
        stride = slot_stride(self._conv, (width - 1, d), h.dtype, batch.device)
        require_slots(batch.max_slot, self._conv.shape[0])
        x, z = h.new_empty((2, len(h), d))
        with torch.cuda.device(h.device):
            extension().few_rows_convolution(
                _product_of(h, w.in_proj),
                batch=batch.params,
                weight=w.conv_weight.data_ptr(),
                bias=address(w.conv_bias),
                state=(self._conv.data_ptr(), stride, _BFLOAT16),
                x=(x.data_ptr(), d, _BFLOAT16),
                z=z.data_ptr(),
                d_inner=d,
                width=width,
                stream=current_stream(),
            )
        return x, z

    def stepped(
        self,
        dt: torch.Tensor,
        x: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        z: torch.Tensor,
        batch: DeviceBatch,
    ) -> torch.Tensor:
        """Run dt_proj and one step of the states. dt: (t, r), input of dt_proj. x, z: (t, d), results of `convolved`.
        b, c: (t, n), each row aligned to 8 bytes. Returns y (t, d). All are bfloat16."""
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
                z=(z.data_ptr(), d, _BFLOAT16),
                dt_bias=w.dt_bias.data_ptr(),
                state=(self._ssm.data_ptr(), stride, FLOAT32),
                y=(y.data_ptr(), d, _BFLOAT16),
                d_inner=d,
                d_state=n,
                stream=current_stream(),
            )
        return y


def _is_fixed_order(packed: DeviceLinear) -> bool:
    """Return True if products with these weights are bfloat16, in fixed order, with one sum over all inputs, and not
    encoded."""
    is_plain = isinstance(packed.weight, torch.Tensor) and packed.dtype == torch.bfloat16
    return is_plain and packed.fixed_order is not None and packed.pieces == 1


def _product_of(x: torch.Tensor, packed: DeviceLinear) -> object:
    """Return the product of x (t, in) without a result tensor: the fused kernel consumes the result."""
    assert isinstance(packed.weight, torch.Tensor)
    return product_of(x, packed.weight, None, packed.pieces)
