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
    require_slots,
    slot_stride,
    token_rows,
    token_stride,
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
    t, d = token_rows(x, ragged.num_tokens)
    x_stride = token_stride(x, "x", t, d, x)
    require_parameter(weight, "weight", (d, weight.shape[-1]), None)
    width = weight.shape[1]
    if not 1 <= width <= MAX_CONV_WIDTH:
        raise ValueError(f"weight must have 1 to {MAX_CONV_WIDTH} columns, the taps; it has {width}")
    if bias is not None:
        require_parameter(bias, "bias", (d,), weight.dtype)
    state_stride = slot_stride(state, (width - 1, d), x.dtype)
    require_slots(ragged.max_slot, state.shape[0])
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
    t, d = token_rows(x, ragged.num_tokens)
    n = A.shape[0]
    if not 1 <= n <= MAX_D_STATE:
        raise ValueError(f"A must have 1 to {MAX_D_STATE} rows, the states of a channel; it has {n}")
    require_parameter(A, "A", (n, d), torch.float32)
    for vector, name in ((D, "D"), (dt_bias, "dt_bias")):
        if vector is not None:
            require_parameter(vector, name, (d,), torch.float32)
    state_stride = slot_stride(state, (n, d), torch.float32)
    require_slots(ragged.max_slot, state.shape[0])
    out = torch.empty((t, d), dtype=x.dtype)
    code = dtype_code(x, "x")
    _C.selective_scan(
        ragged=ragged.params,
        x=(x.data_ptr(), token_stride(x, "x", t, d, x), code),
        dt=(dt.data_ptr(), token_stride(dt, "dt", t, d, x), code),
        A=A.data_ptr(),
        B=(B.data_ptr(), token_stride(B, "B", t, n, x), code),
        C=(C.data_ptr(), token_stride(C, "C", t, n, x), code),
        D=address(D),
        z=None if z is None else (z.data_ptr(), token_stride(z, "z", t, d, x), code),
        dt_bias=address(dt_bias),
        state=(state.data_ptr(), state_stride, FLOAT32),
        out=(out.data_ptr(), d, code),
        d_inner=d,
        d_state=n,
        num_threads=num_threads(),
    )
    return out
