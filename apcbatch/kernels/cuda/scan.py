"""The recurrent ops on a CUDA device: the same arguments, results and invariants as in apcbatch.kernels.cpu.scan, and
float16 too. They run on the current stream and return before the device has finished.

Must not know: models, which layer's state it is. Invariants: tokens go strictly in sequence for each channel, so
that cuts, batch mates and decoding change no bit. The bits are not those of the CPU kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from apcbatch.kernels.cuda.batch import DeviceBatch
from apcbatch.kernels.ragged import Ragged

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/params.h, DType


@cache
def extension() -> Any:
    """apcbatch._CUDA; RuntimeError where it was not built."""
    try:
        from apcbatch import _CUDA
    except ImportError as error:
        raise RuntimeError(
            f"the CUDA kernels are not in this build ({error}): install nvcc and build again with APCBATCH_CUDA=1"
        ) from error
    return _CUDA


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    ragged: Ragged | DeviceBatch,
) -> torch.Tensor:
    """See apcbatch.kernels.cpu.scan; weight and bias may be of any of the three dtypes."""
    batch = batch_on(x.device, ragged)
    t, d = _rows_shape(x, batch)
    width = weight.shape[-1]
    most = extension().MOST_TAPS
    if not 1 <= width <= most:
        raise ValueError(f"weight must have 1 to {most} columns, the taps; it has {width}")
    _require(weight, "weight", (d, width), weight.dtype, x.device)
    if bias is not None:
        _require(bias, "bias", (d,), weight.dtype, x.device)
    slot_stride = _slot_stride(state, (width - 1, d), x.dtype, batch)
    out = torch.empty((t, d), dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        code = _code(x, "x")
        extension().causal_conv(
            batch=batch.params,
            x=(x.data_ptr(), _row_stride(x, "x", t, d, x), code),
            weight=(weight.data_ptr(), width, _code(weight, "weight")),
            bias=_address(bias),
            state=(state.data_ptr(), slot_stride, code),
            out=(out.data_ptr(), d, code),
            d_inner=d,
            width=width,
            stream=torch.cuda.current_stream().cuda_stream,
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
    ragged: Ragged | DeviceBatch,
    lanes: int = 0,
) -> torch.Tensor:
    """See apcbatch.kernels.cpu.scan; n 1 to 128. lanes (1, 2, 4, 8; 0: the kernel chooses) share a channel's states:
    a matter of speed, not of bits."""
    batch = batch_on(x.device, ragged)
    t, d = _rows_shape(x, batch)
    n, most = A.shape[0], extension().MOST_STATES
    if not 1 <= n <= most:
        raise ValueError(f"A must have 1 to {most} rows on a CUDA device, the states of a channel; it has {n}")
    _require(A, "A", (n, d), torch.float32, x.device)
    for vector, name in ((D, "D"), (dt_bias, "dt_bias")):
        if vector is not None:
            _require(vector, name, (d,), torch.float32, x.device)
    slot_stride = _slot_stride(state, (n, d), torch.float32, batch)
    out = torch.empty((t, d), dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        code = _code(x, "x")
        extension().selective_scan(
            batch=batch.params,
            x=(x.data_ptr(), _row_stride(x, "x", t, d, x), code),
            dt=(dt.data_ptr(), _row_stride(dt, "dt", t, d, x), code),
            A=A.data_ptr(),
            B=(B.data_ptr(), _row_stride(B, "B", t, n, x), code),
            C=(C.data_ptr(), _row_stride(C, "C", t, n, x), code),
            D=_address(D),
            z=None if z is None else (z.data_ptr(), _row_stride(z, "z", t, d, x), code),
            dt_bias=_address(dt_bias),
            state=(state.data_ptr(), slot_stride, DTYPE_CODES[torch.float32]),
            out=(out.data_ptr(), d, code),
            d_inner=d,
            d_state=n,
            lanes=lanes,
            stream=torch.cuda.current_stream().cuda_stream,
        )
    return out


def batch_on(device: torch.device, ragged: Ragged | DeviceBatch) -> DeviceBatch:
    """The batch on this device: a Ragged is uploaded by the first op that meets it. ValueError for a DeviceBatch of
    another device."""
    if isinstance(ragged, Ragged):
        extension()
        return ragged.on(device, DeviceBatch)
    if ragged.device != device:
        raise ValueError(f"the batch must be on {device}, like x; it is on {ragged.device}")
    return ragged


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _code(tensor: torch.Tensor, name: str) -> int:
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"{name} must be float32, bfloat16 or float16; it is {tensor.dtype}")
    return code


def _rows_shape(x: torch.Tensor, batch: DeviceBatch) -> tuple[int, int]:
    """(t, d) of x; ValueError unless it has a row for each of the batch's tokens."""
    shape = tuple(x.shape)
    if len(shape) != 2 or shape[0] != batch.num_tokens or shape[1] == 0:
        raise ValueError(
            f"x must be ({batch.num_tokens}, d_inner), a row for each token of cu_seqlens; it is {shape}"
        )
    return shape[0], shape[1]


def _row_stride(tensor: torch.Tensor, name: str, rows: int, columns: int, like: torch.Tensor) -> int:
    """Elements from one token to the next; ValueError unless (rows, columns), rows contiguous, as x is."""
    strides = tensor.stride()
    if (
        tensor.dtype == like.dtype and tensor.device == like.device and tensor.shape == (rows, columns)
        and (strides[1] == 1 or columns == 1)
    ):
        return strides[0]
    raise ValueError(
        f"{name} must be {like.dtype} on {like.device} (like x) of shape ({rows}, {columns}) with a stride of 1 "
        f"within a row; it is {tensor.dtype} on {tensor.device} of shape {tuple(tensor.shape)} with strides {strides}"
    )


def _require(
    tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if (
        tensor.shape == shape and tensor.is_contiguous() and tensor.dtype == dtype and tensor.device == device
    ):
        return
    raise ValueError(
        f"{name} must be contiguous of shape {shape} and {dtype} on {device}; it is {tensor.dtype} on "
        f"{tensor.device} of shape {tuple(tensor.shape)} with strides {tensor.stride()}"
    )


def _slot_stride(
    state: torch.Tensor, slot_shape: tuple[int, int], dtype: torch.dtype, batch: DeviceBatch
) -> int:
    """Elements from one slot to the next; ValueError unless the batch's slots are there and whole."""
    shape, strides = tuple(state.shape), state.stride()
    if (
        state.dtype != dtype or state.device != batch.device or shape[1:] != slot_shape or len(shape) != 3
        or (state.numel() and strides[1:] != (slot_shape[1], 1))
    ):
        raise ValueError(
            f"state must be {dtype} on {batch.device} of shape (num_slots, {slot_shape[0]}, {slot_shape[1]}), each "
            f"slot contiguous; it is {state.dtype} on {state.device} of shape {shape} with strides {strides}"
        )
    if batch.max_slot >= shape[0]:
        raise ValueError(
            f"state must have slot {batch.max_slot}, which the batch names; it has {shape[0]} slots"
        )
    return strides[0]
