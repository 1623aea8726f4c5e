"""Recurrent ops on a CUDA device. Arguments, results and invariants: apcbatch.kernels.cpu.scan, plus float16.

The ops run on the current stream and return before the device has finished. A channel's tokens are processed strictly
in order. So neither cuts of a sequence nor the rest of the batch change a bit. The bits differ from the CPU kernels'.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.cuda.batch import DeviceBatch
from apcbatch.kernels.cuda.extension import DTYPE_CODES, current_stream, extension
from apcbatch.kernels.ragged import Ragged
from apcbatch.kernels.recurrent_arguments import conv_arguments, scan_arguments


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    ragged: Ragged | DeviceBatch,
) -> torch.Tensor:
    """See apcbatch.kernels.cpu.scan. weight and bias may also be float16."""
    batch = batch_on(x.device, ragged)
    sizes = batch.num_tokens, batch.max_slot, extension().MOST_TAPS
    arguments, out = conv_arguments(x, weight, bias, state, *sizes, DTYPE_CODES)
    with torch.cuda.device(x.device):
        extension().causal_conv(batch=batch.params, stream=current_stream(), **arguments)
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
    """See apcbatch.kernels.cpu.scan; here n is 1 to 128. lanes: threads that share a channel's states, 1, 2, 4 or 8; 0:
    the kernel chooses. It changes the speed, not the bits."""
    batch = batch_on(x.device, ragged)
    sizes = batch.num_tokens, batch.max_slot, extension().MOST_STATES
    arguments, out = scan_arguments(x, dt, A, B, C, D, z, dt_bias, state, *sizes, DTYPE_CODES)
    with torch.cuda.device(x.device):
        extension().selective_scan(batch=batch.params, lanes=lanes, stream=current_stream(), **arguments)
    return out


def batch_on(device: torch.device, ragged: Ragged | DeviceBatch) -> DeviceBatch:
    """Return the batch on this device. A Ragged is uploaded by the first op that uses it. Raises ValueError for a
    DeviceBatch on another device."""
    if isinstance(ragged, Ragged):
        return ragged.on(device, DeviceBatch)
    if ragged.device != device:
        raise ValueError(f"the batch must be on {device}, like x; it is on {ragged.device}")
    return ragged
