"""The recurrent ops on a CUDA device: the same arguments, results and invariants as in apcbatch.kernels.cpu.scan, and
float16 too. They run on the current stream and return before the device has finished.

Must not know: models, which layer's state it is. Invariants: tokens go strictly in sequence for each channel, so
that cuts, batch mates and decoding change no bit. The bits are not those of the CPU kernels.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import (
    address,
    dtype_code,
    require_parameter,
    require_slots,
    slot_stride,
    token_rows,
    token_stride,
)
from apcbatch.kernels.cuda.batch import DeviceBatch
from apcbatch.kernels.cuda.extension import DTYPE_CODES, current_stream, extension
from apcbatch.kernels.ragged import Ragged


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    ragged: Ragged | DeviceBatch,
) -> torch.Tensor:
    """See apcbatch.kernels.cpu.scan; weight and bias may be of any of the three dtypes."""
    batch = batch_on(x.device, ragged)
    t, d = token_rows(x, batch.num_tokens)
    width = weight.shape[-1]
    most = extension().MOST_TAPS
    if not 1 <= width <= most:
        raise ValueError(f"weight must have 1 to {most} columns, the taps; it has {width}")
    require_parameter(weight, "weight", (d, width), weight.dtype, x.device)
    if bias is not None:
        require_parameter(bias, "bias", (d,), weight.dtype, x.device)
    state_stride = slot_stride(state, (width - 1, d), x.dtype, batch.device)
    require_slots(batch.max_slot, state.shape[0])
    out = torch.empty((t, d), dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        code = dtype_code(x, "x", DTYPE_CODES)
        extension().causal_conv(
            batch=batch.params,
            x=(x.data_ptr(), token_stride(x, "x", t, d, x), code),
            weight=(weight.data_ptr(), width, dtype_code(weight, "weight", DTYPE_CODES)),
            bias=address(bias),
            state=(state.data_ptr(), state_stride, code),
            out=(out.data_ptr(), d, code),
            d_inner=d,
            width=width,
            stream=current_stream(),
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
    t, d = token_rows(x, batch.num_tokens)
    n, most = A.shape[0], extension().MOST_STATES
    if not 1 <= n <= most:
        raise ValueError(f"A must have 1 to {most} rows on a CUDA device, the states of a channel; it has {n}")
    require_parameter(A, "A", (n, d), torch.float32, x.device)
    for vector, name in ((D, "D"), (dt_bias, "dt_bias")):
        if vector is not None:
            require_parameter(vector, name, (d,), torch.float32, x.device)
    state_stride = slot_stride(state, (n, d), torch.float32, batch.device)
    require_slots(batch.max_slot, state.shape[0])
    out = torch.empty((t, d), dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        code = dtype_code(x, "x", DTYPE_CODES)
        extension().selective_scan(
            batch=batch.params,
            x=(x.data_ptr(), token_stride(x, "x", t, d, x), code),
            dt=(dt.data_ptr(), token_stride(dt, "dt", t, d, x), code),
            A=A.data_ptr(),
            B=(B.data_ptr(), token_stride(B, "B", t, n, x), code),
            C=(C.data_ptr(), token_stride(C, "C", t, n, x), code),
            D=address(D),
            z=None if z is None else (z.data_ptr(), token_stride(z, "z", t, d, x), code),
            dt_bias=address(dt_bias),
            state=(state.data_ptr(), state_stride, DTYPE_CODES[torch.float32]),
            out=(out.data_ptr(), d, code),
            d_inner=d,
            d_state=n,
            lanes=lanes,
            stream=current_stream(),
        )
    return out


def batch_on(device: torch.device, ragged: Ragged | DeviceBatch) -> DeviceBatch:
    """The batch on this device: a Ragged is uploaded by the first op that meets it. ValueError for a DeviceBatch of
    another device."""
    if isinstance(ragged, Ragged):
        return ragged.on(device, DeviceBatch)
    if ragged.device != device:
        raise ValueError(f"the batch must be on {device}, like x; it is on {ragged.device}")
    return ragged
