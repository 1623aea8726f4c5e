"""Check tensors for the kernels of every device, and convert them to (address, stride, dtype code).

`name` is the tensor's name in error messages. The ops (apcbatch.kernels.ops) and the fused sub-blocks build their
arguments from these functions.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from apcbatch import _C

FLOAT32 = 0  # csrc/params.h, DType
DTYPE_CODES = {torch.float32: FLOAT32, torch.bfloat16: 1}
CPU = torch.device("cpu")
PAGE_TOKENS: int = _C.PAGE_TOKENS


def dtype_code(tensor: torch.Tensor, name: str) -> int:
    """Return the kernels' code for a tensor's dtype. Raises ValueError unless it is float32 or bfloat16."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"{name} must be float32 or bfloat16; it is {tensor.dtype}")
    return code


def require_cpu(tensor: torch.Tensor, name: str) -> None:
    """Raise ValueError unless the tensor is on the CPU."""
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU, where this kernel runs; it is on {tensor.device}")


def require_matrix(tensor: torch.Tensor, name: str) -> None:
    """Raise ValueError unless the tensor has two dimensions."""
    if tensor.dim() != 2:
        raise ValueError(f"{name} must have two dimensions; its shape is {tuple(tensor.shape)}")


def require_alike(tensor: torch.Tensor, name: str, other: torch.Tensor, other_name: str) -> None:
    """Raise ValueError unless both tensors have the same shape and device."""
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} must have the shape of {other_name}, {tuple(other.shape)}; its shape is {tuple(tensor.shape)}"
        )
    require_beside(tensor, name, other)


def require_one_dtype(tensor: torch.Tensor, name: str, other: torch.Tensor, other_name: str) -> None:
    """Raise ValueError unless both tensors have the same dtype."""
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name} and {other_name} must have one dtype; they are {tensor.dtype} and {other.dtype}")


def require_indices(tensor: torch.Tensor, name: str, shape: tuple[int, ...], end: int) -> torch.Tensor:
    """Return the tensor, made contiguous. Raises ValueError unless it is int64 on the CPU, has this shape, and all its
    values lie in [0, end)."""
    require_cpu(tensor, name)
    if tensor.dtype != torch.int64 or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be int64 of shape {shape}; it is {tensor.dtype} of shape {tuple(tensor.shape)}")
    tensor = tensor.contiguous()
    if tensor.numel():
        lowest, highest = _C.span(tensor.data_ptr(), tensor.numel())
        if lowest < 0 or highest >= end:
            raise ValueError(f"{name} must lie in [0, {end}); its values span {lowest} to {highest}")
    return tensor


def float_vector(tensor: torch.Tensor, name: str, size: int, matrix: torch.Tensor, matrix_name: str) -> torch.Tensor:
    """Return the tensor as contiguous float32, converted if needed. Raises ValueError unless its shape is (size,), one
    value per column of `matrix`, and it is on the device of `matrix`. matrix_name: for the error message."""
    require_beside(tensor, name, matrix)
    if tensor.shape != (size,):
        raise ValueError(f"{name} must be ({size},), one value a column of {matrix_name}; it is {tuple(tensor.shape)}")
    if tensor.dtype == torch.float32 and tensor.is_contiguous():
        return tensor
    return tensor.to(torch.float32).contiguous()


def _row_stride(tensor: torch.Tensor, name: str) -> int:
    """Return the stride of the first dimension, in elements. Raises ValueError unless each row is contiguous."""
    stride = tensor.stride()
    if len(stride) == 2 and stride[1] == 1:
        return stride[0]
    expected = 1
    for size, step in zip(reversed(tensor.shape[1:]), reversed(stride[1:]), strict=True):
        if size != 1 and step != expected:
            raise ValueError(
                f"{name} must be contiguous within a row (any stride between rows); its strides are {stride} "
                f"for the shape {tuple(tensor.shape)}: call .contiguous() on it"
            )
        expected *= size
    return stride[0]


def require_parameter(
    tensor: torch.Tensor,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> None:
    """Raise ValueError unless the tensor is contiguous, on the device, and has this shape and dtype."""
    if tensor.shape == shape and tensor.is_contiguous() and tensor.dtype == dtype:
        require_on(tensor, name, device)
        return
    raise ValueError(
        f"{name} must be contiguous of shape {shape} and {dtype}{where(device)}; "
        f"it is {tensor.dtype} of shape {tuple(tensor.shape)} with strides {tensor.stride()}"
    )


def view(tensor: torch.Tensor, name: str) -> _C.View:
    """Convert a tensor to the compiled modules' view: (address, row stride in elements, dtype code). Raises ValueError
    unless each row is contiguous and the dtype float32 or bfloat16."""
    return tensor.data_ptr(), _row_stride(tensor, name), dtype_code(tensor, name)


def address(tensor: torch.Tensor | None) -> int:
    """Return the address of the tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def require_beside(tensor: torch.Tensor, name: str, other: torch.Tensor) -> None:
    """Raise ValueError unless both tensors are on the same device."""
    require_on(tensor, name, other.device)


def require_on(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    """Raise ValueError unless the tensor is on the device."""
    if device.type == "cpu":
        require_cpu(tensor, name)
    elif tensor.device != device:
        raise ValueError(f"{name} must be {tensor.dtype} on {device}, where this kernel runs; it is on {tensor.device}")


def where(device: torch.device) -> str:
    """Return the device for an error message, such as " on cuda:0"; "" for the CPU."""
    return "" if device.type == "cpu" else f" on {device}"


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
    state: torch.Tensor, slot_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU
) -> int:
    """Return the slot stride of a state in elements. Raises ValueError unless the state is on the device and its slots
    have this shape and dtype, are contiguous and do not overlap."""
    strides = state.stride()
    shape = tuple(state.shape)
    require_on(state, "state", device)
    contiguous = tuple(math.prod(slot_shape[axis + 1 :]) for axis in range(len(slot_shape)))
    if state.dtype != dtype or shape[1:] != slot_shape or (state.numel() and strides[1:] != contiguous):
        raise ValueError(
            f"state must be {dtype}{where(device)} of shape (num_slots, {', '.join(map(str, slot_shape))}), each slot "
            f"contiguous; it is {state.dtype} of shape {shape} with strides {strides}"
        )
    if shape[0] > 1 and strides[0] < math.prod(slot_shape):
        raise ValueError(
            f"the state's slots must not overlap, as they are written; its strides are {strides} for the shape {shape}"
        )
    return strides[0]


def head_scan_params(
    compiled: Any,
    dtype: torch.dtype,
    keys: tuple[int, int],
    values: tuple[int, int],
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, 0.0),
) -> Any:
    """Check and pack what a recurrence over heads needs besides the inputs of a call: see Ops.head_scan. Returns the
    HeadScanParams of the compiled module.

    dtype: of the inputs. keys: (Hk, K). values: (Hv, V). The result holds addresses: the caller keeps A, dt_bias, D and
    state alive. Raises ValueError if a shape or a dtype does not fit.
    """
    (key_heads, key_dim), (heads, value_dim), lanes = keys, values, state.shape[-1]
    for name, vector in (("A", A), ("dt_bias", dt_bias), *([] if D is None else [("D", D)])):
        require_parameter(vector, name, (heads,), torch.float32, state.device)
    if lanes == 0 or value_dim % lanes:
        raise ValueError(f"state must have blocks that divide the {value_dim} columns; it is {tuple(state.shape)}")
    stride = slot_stride(state, (heads, value_dim // lanes, key_dim, lanes), torch.float32, state.device)
    return compiled.HeadScanParams(
        dtype=DTYPE_CODES[dtype],
        key_heads=key_heads,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        lanes=lanes,
        A=A.data_ptr(),
        dt_bias=dt_bias.data_ptr(),
        D=address(D),
        dt_min=dt_limits[0],
        dt_max=dt_limits[1],
        state=(state.data_ptr(), stride, FLOAT32),
    )


def require_slots(max_slot: int, num_slots: int) -> None:
    """Raise ValueError unless the state has every slot that the batch names. max_slot: highest of them; -1: none."""
    if max_slot >= num_slots:
        raise ValueError(f"state must have slot {max_slot}, which the batch names; it has {num_slots} slots")


def cache_views(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[_C.View, _C.View]:
    """Return views of both caches; their stride is 0, as no kernel uses it. Raises ValueError unless both are
    contiguous (pages, PAGE_TOKENS, kv_heads, head_dim), of one dtype."""
    require_alike(v_cache, "v_cache", k_cache, "k_cache")
    if k_cache.dim() != 4 or k_cache.shape[1] != PAGE_TOKENS:
        raise ValueError(f"the cache must be (pages, {PAGE_TOKENS}, kv_heads, head_dim); it is {tuple(k_cache.shape)}")
    if k_cache.shape[2] == 0 or k_cache.shape[3] == 0:
        raise ValueError(
            f"the cache must have at least one kv head of at least one column; it is {tuple(k_cache.shape)}"
        )
    require_one_dtype(k_cache, "k_cache", v_cache, "v_cache")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous; allocate one pair a layer")
    code = dtype_code(k_cache, "k_cache")
    return (k_cache.data_ptr(), 0, code), (v_cache.data_ptr(), 0, code)


def require_sums(residual: torch.Tensor, delta: torch.Tensor) -> None:
    """Raise ValueError unless delta can be added to the residual in place: both matrices of one shape, the residual
    float32 with rows that do not overlap."""
    require_matrix(residual, "residual")
    require_alike(delta, "delta", residual, "residual")
    if residual.dtype != torch.float32:
        raise ValueError(f"residual must be float32, in which it is summed; it is {residual.dtype}")
    if residual.shape[0] > 1 and residual.stride(0) < residual.shape[1]:
        raise ValueError(
            f"the residual's rows must not overlap, as they are written; its strides are {residual.stride()} for "
            f"the shape {tuple(residual.shape)}"
        )


def require_logits(logits: torch.Tensor) -> tuple[int, int]:
    """Return the shape (t, v) of logits. Raises ValueError unless they are a float32 matrix with columns."""
    require_matrix(logits, "logits")
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32; they are {logits.dtype}")
    t, v = logits.shape
    if v == 0:
        raise ValueError("logits must have at least one column; they have none")
    return t, v
