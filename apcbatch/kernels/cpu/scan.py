"""The recurrent ops of the CPU: the causal convolution and the selective scan, over ragged batches and slots.

Must not know: models, which layer's state it is. Invariants: tokens go strictly in sequence, so a sequence
cut anywhere gives the same bits; a snapshot is the state that the kernel goes on with; slots that the Ragged
does not name are not touched. What each op computes is defined by apcbatch.kernels.reference.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import (
    FLOAT32,
    address,
    contiguous_view,
    dtype_code,
    num_threads,
    require_cpu,
    require_parameter,
)
from apcbatch.kernels.ragged import Ragged

MAX_CONV_WIDTH = 8
MAX_D_STATE = 256


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """Depthwise causal convolution and SiLU.

    x: (t, d) float32 or bfloat16, any token stride. weight: (d, w) float32 or bfloat16, w 1 to 8. bias: (d)
    of the weight's dtype. state: (num_slots, w - 1, d) of x's dtype, any slot stride: the last w - 1 raw
    inputs, oldest first, zeros before the first token. Returns (t, d) of x's dtype. Raises ValueError.
    """
    require_cpu(x, "x")
    t, d = _rows_shape(x, ragged)
    x_stride = _row_stride(x, "x", t, d, x.dtype)
    require_parameter(weight, "weight", (d, weight.shape[-1]), None)
    width = weight.shape[1]
    if not 1 <= width <= MAX_CONV_WIDTH:
        raise ValueError(f"weight must have 1 to {MAX_CONV_WIDTH} columns, the taps; it has {width}")
    if bias is not None:
        require_parameter(bias, "bias", (d,), weight.dtype)
    state_stride = slot_stride(state, (width - 1, d), x.dtype)
    require_slots(ragged, state.shape[0])
    out = torch.empty((t, d), dtype=x.dtype)
    code = dtype_code(x, "x")
    _C.causal_conv(
        ragged=ragged.params,
        x=(x.data_ptr(), x_stride, code),
        weight=contiguous_view(weight, "weight"),
        bias=address(bias),
        state=(state.data_ptr(), state_stride, code),
        out=(out.data_ptr(), d, code),
        d_inner=d,
        width=width,
        num_threads=num_threads(),
    )
    return out


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    ragged: Ragged,
) -> torch.Tensor:
    """The selective state-space recurrence: y_t = (D x_t + sum_n C_tn h_tn) silu(z_t), where
    h_tn = exp(dt A_n) h_(t-1)n + dt x_t B_tn and dt = softplus(dt_t + dt_bias). All in float32.

    x, dt, z: (t, d), B, C: (t, n), of one dtype, float32 or bfloat16, any token stride. A: (n, d) float32
    contiguous, -exp(A_log) transposed; n 1 to 256. D, dt_bias: (d) float32. state: (num_slots, n, d) float32,
    any slot stride. Without D, z or dt_bias their term is left out. Returns (t, d) of x's dtype. Decoding is
    the same op on sequences of one token. Raises ValueError.
    """
    require_cpu(x, "x")
    t, d = _rows_shape(x, ragged)
    n = A.shape[0]
    if not 1 <= n <= MAX_D_STATE:
        raise ValueError(f"A must have 1 to {MAX_D_STATE} rows, the states of a channel; it has {n}")
    require_parameter(A, "A", (n, d), torch.float32)
    for vector, name in ((D, "D"), (dt_bias, "dt_bias")):
        if vector is not None:
            require_parameter(vector, name, (d,), torch.float32)
    dtype = x.dtype
    state_stride = slot_stride(state, (n, d), torch.float32)
    require_slots(ragged, state.shape[0])
    out = torch.empty((t, d), dtype=dtype)
    code = dtype_code(x, "x")
    _C.selective_scan(
        ragged=ragged.params,
        x=(x.data_ptr(), _row_stride(x, "x", t, d, dtype), code),
        dt=(dt.data_ptr(), _row_stride(dt, "dt", t, d, dtype), code),
        A=A.data_ptr(),
        B=(B.data_ptr(), _row_stride(B, "B", t, n, dtype), code),
        C=(C.data_ptr(), _row_stride(C, "C", t, n, dtype), code),
        D=address(D),
        z=None if z is None else (z.data_ptr(), _row_stride(z, "z", t, d, dtype), code),
        dt_bias=address(dt_bias),
        state=(state.data_ptr(), state_stride, FLOAT32),
        out=(out.data_ptr(), d, code),
        d_inner=d,
        d_state=n,
        num_threads=num_threads(),
    )
    return out


def _rows_shape(x: torch.Tensor, ragged: Ragged) -> tuple[int, int]:
    """(t, d) of x; ValueError unless it has a row for each of the batch's tokens."""
    shape = tuple(x.shape)
    if len(shape) != 2 or shape[0] != ragged.num_tokens or shape[1] == 0:
        raise ValueError(
            f"x must be ({ragged.num_tokens}, d_inner), a row for each token of cu_seqlens; it is {shape}"
        )
    return shape[0], shape[1]


def _row_stride(tensor: torch.Tensor, name: str, rows: int, columns: int, dtype: torch.dtype) -> int:
    """Elements from one token to the next; ValueError unless (rows, columns) of dtype, rows contiguous."""
    strides = tensor.stride()
    if tensor.dtype == dtype and tensor.shape == (rows, columns) and (strides[1] == 1 or columns == 1):
        require_cpu(tensor, name)
        return strides[0]
    raise ValueError(
        f"{name} must be {dtype} (like x) of shape ({rows}, {columns}) with a stride of 1 within a row; "
        f"it is {tensor.dtype} of shape {tuple(tensor.shape)} with strides {strides}"
    )


def slot_stride(state: torch.Tensor, slot_shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Elements from one slot to the next; ValueError unless the slots have this shape, are contiguous and lie
    apart."""
    require_cpu(state, "state")
    strides = state.stride()
    shape = tuple(state.shape)
    if (
        state.dtype != dtype or shape[1:] != slot_shape or len(shape) != 3
        or (state.numel() and strides[1:] != (slot_shape[1], 1))
    ):
        raise ValueError(
            f"state must be {dtype} of shape (num_slots, {slot_shape[0]}, {slot_shape[1]}), each slot "
            f"contiguous; it is {state.dtype} of shape {shape} with strides {strides}"
        )
    if shape[0] > 1 and strides[0] < slot_shape[0] * slot_shape[1]:
        raise ValueError(
            f"the state's slots must not overlap, as they are written; its strides are {strides} for the shape {shape}"
        )
    return strides[0]


def require_slots(ragged: Ragged, num_slots: int) -> None:
    """ValueError unless the state has every slot that the batch names."""
    if ragged.max_slot >= num_slots:
        raise ValueError(
            f"state must have slot {ragged.max_slot}, which the batch names; it has {num_slots} slots"
        )
