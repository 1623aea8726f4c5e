"""Check the arguments of causal_conv and selective_scan, the recurrent ops, for all devices.

conv_arguments and scan_arguments take an op's tensors. They return its arguments, named as in the compiled modules,
and a new tensor for its result. They raise ValueError if an argument does not fit. codes: dtype -> code of the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from apcbatch.kernels.arguments import (
    CPU,
    DTYPE_CODES,
    FLOAT32,
    address,
    dtype_code,
    require_beside,
    require_on,
    require_parameter,
    where,
)


def token_rows(x: torch.Tensor, num_tokens: int) -> tuple[int, int]:
    """Return the shape (t, d) of x. Raises ValueError unless x has one row per token of the batch."""
    shape = tuple(x.shape)
    if len(shape) != 2 or shape[0] != num_tokens or shape[1] == 0:
        raise ValueError(f"x must be ({num_tokens}, d_inner), a row for each token of cu_seqlens; it is {shape}")
    return shape[0], shape[1]


def token_stride(tensor: torch.Tensor, name: str, rows: int, columns: int, x: torch.Tensor) -> int:
    """Return the token stride in elements. Raises ValueError unless the tensor is (rows, columns) with contiguous rows,
    of x's dtype and on x's device."""
    strides = tensor.stride()
    if tensor.dtype == x.dtype and tensor.shape == (rows, columns) and (strides[1] == 1 or columns == 1):
        require_beside(tensor, name, x)
        return strides[0]
    raise ValueError(
        f"{name} must be {x.dtype}{where(x.device)} (like x) of shape ({rows}, {columns}) with a stride of 1 within "
        f"a row; it is {tensor.dtype} of shape {tuple(tensor.shape)} with strides {strides}"
    )


def slot_stride(
    state: torch.Tensor, slot_shape: tuple[int, int], dtype: torch.dtype, device: torch.device = CPU
) -> int:
    """Return the slot stride of a state in elements. Raises ValueError unless the state is on the device and its slots
    have this shape and dtype, are contiguous and do not overlap."""
    strides = state.stride()
    shape = tuple(state.shape)
    require_on(state, "state", device)
    if state.dtype != dtype or shape[1:] != slot_shape or (state.numel() and strides[1:] != (slot_shape[1], 1)):
        raise ValueError(
            f"state must be {dtype}{where(device)} of shape (num_slots, {slot_shape[0]}, {slot_shape[1]}), each slot "
            f"contiguous; it is {state.dtype} of shape {shape} with strides {strides}"
        )
    if shape[0] > 1 and strides[0] < slot_shape[0] * slot_shape[1]:
        raise ValueError(
            f"the state's slots must not overlap, as they are written; its strides are {strides} for the shape {shape}"
        )
    return strides[0]


def require_slots(max_slot: int, num_slots: int) -> None:
    """Raise ValueError unless the state has every slot that the batch names."""
    if max_slot >= num_slots:
        raise ValueError(f"state must have slot {max_slot}, which the batch names; it has {num_slots} slots")


def conv_arguments(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    num_tokens: int,
    max_slot: int,
    most_taps: int,
    codes: Mapping[torch.dtype, int] = DTYPE_CODES,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Check the arguments of `causal_conv`. Returns the compiled module's keyword arguments, and the result tensor."""
    device, (t, d) = x.device, token_rows(x, num_tokens)
    width, code = weight.shape[-1], dtype_code(x, "x", codes)
    x_stride = token_stride(x, "x", t, d, x)
    require_parameter(weight, "weight", (d, width), None, device)
    if not 1 <= width <= most_taps:
        raise ValueError(f"weight must have 1 to {most_taps} columns, the taps; it has {width}")
    if bias is not None:
        require_parameter(bias, "bias", (d,), weight.dtype, device)
    state_stride = slot_stride(state, (width - 1, d), x.dtype, device)
    require_slots(max_slot, state.shape[0])
    out = torch.empty((t, d), dtype=x.dtype, device=device)
    arguments = {
        "x": (x.data_ptr(), x_stride, code),
        "weight": (weight.data_ptr(), width, dtype_code(weight, "weight", codes)),
        "bias": address(bias),
        "state": (state.data_ptr(), state_stride, code),
        "out": (out.data_ptr(), d, code),
        "d_inner": d,
        "width": width,
    }
    return arguments, out


def scan_arguments(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    num_tokens: int,
    max_slot: int,
    most_states: int,
    codes: Mapping[torch.dtype, int] = DTYPE_CODES,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Check the arguments of `selective_scan`. Returns the compiled module's keyword arguments, and the result
    tensor."""
    device, (t, d) = x.device, token_rows(x, num_tokens)
    n, code = A.shape[0], dtype_code(x, "x", codes)
    if not 1 <= n <= most_states:
        raise ValueError(f"A must have 1 to {most_states} rows{where(device)}, the states of a channel; it has {n}")
    require_parameter(A, "A", (n, d), torch.float32, device)
    for vector, name in ((D, "D"), (dt_bias, "dt_bias")):
        if vector is not None:
            require_parameter(vector, name, (d,), torch.float32, device)
    state_stride = slot_stride(state, (n, d), torch.float32, device)
    require_slots(max_slot, state.shape[0])
    out = torch.empty((t, d), dtype=x.dtype, device=device)
    arguments = {
        "x": (x.data_ptr(), token_stride(x, "x", t, d, x), code),
        "dt": (dt.data_ptr(), token_stride(dt, "dt", t, d, x), code),
        "A": A.data_ptr(),
        "B": (B.data_ptr(), token_stride(B, "B", t, n, x), code),
        "C": (C.data_ptr(), token_stride(C, "C", t, n, x), code),
        "D": address(D),
        "z": None if z is None else (z.data_ptr(), token_stride(z, "z", t, d, x), code),
        "dt_bias": address(dt_bias),
        "state": (state.data_ptr(), state_stride, FLOAT32),
        "out": (out.data_ptr(), d, code),
        "d_inner": d,
        "d_state": n,
    }
    return arguments, out
