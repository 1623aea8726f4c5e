"""The recurrent ops on a CUDA device: the same arguments, results and invariants as in apcbatch.kernels.cpu.scan, and
float16 too. They run on the current stream and return before the device has finished.

Must not know: models, which layer's state it is. Invariants: tokens go strictly in sequence for each channel, so
that cuts, batch mates and decoding change no bit. The bits are not those of the CPU kernels.
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
    """See apcbatch.kernels.cpu.scan; weight and bias may be of any of the three dtypes."""
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
    """See apcbatch.kernels.cpu.scan; n 1 to 128. lanes (1, 2, 4, 8; 0: the kernel chooses) share a channel's states:
    a matter of speed, not of bits."""
    batch = batch_on(x.device, ragged)
    sizes = batch.num_tokens, batch.max_slot, extension().MOST_STATES
    arguments, out = scan_arguments(x, dt, A, B, C, D, z, dt_bias, state, *sizes, DTYPE_CODES)
    with torch.cuda.device(x.device):
        extension().selective_scan(batch=batch.params, lanes=lanes, stream=current_stream(), **arguments)
    return out


def batch_on(device: torch.device, ragged: Ragged | DeviceBatch) -> DeviceBatch:
    """The batch on this device: a Ragged is uploaded by the first op that meets it. ValueError for a DeviceBatch of
    another device."""
    if isinstance(ragged, Ragged):
        return ragged.on(device, DeviceBatch)
    if ragged.device != device:
        raise ValueError(f"the batch must be on {device}, like x; it is on {ragged.device}")
    return ragged
