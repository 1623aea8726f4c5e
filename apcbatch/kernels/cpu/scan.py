"""Recurrent ops on the CPU, over ragged batches and state slots: causal convolution and selective scan.

Invariants: a sequence's tokens are processed strictly in order, so cutting it anywhere gives the same bits. A snapshot
is a copy of the carry itself. Slots that the Ragged does not name stay untouched. apcbatch.kernels.reference defines
what each op computes.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import num_threads, require_cpu
from apcbatch.kernels.ragged import Ragged
from apcbatch.kernels.recurrent_arguments import conv_arguments, scan_arguments

MAX_CONV_WIDTH = 8
MAX_D_STATE = 256


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """Compute the depthwise causal convolution, then SiLU.

    x: (t, d) float32 or bfloat16, any token stride. weight: (d, w) float32 or bfloat16, w 1 to 8. bias: (d,) in the
    weight's dtype, or None. state: (num_slots, w - 1, d) in x's dtype, any slot stride: the last w - 1 raw inputs,
    oldest first, zeros before the first token. Returns (t, d) in x's dtype. Raises ValueError.
    """
    require_cpu(x, "x")
    arguments, out = conv_arguments(x, weight, bias, state, ragged.num_tokens, ragged.max_slot, MAX_CONV_WIDTH)
    _C.causal_conv(ragged=ragged.params, num_threads=num_threads(), **arguments)
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
    """Compute the selective state-space recurrence in float32: y_t = (D x_t + sum_n C_tn h_tn) silu(z_t), where
    h_tn = exp(dt A_n) h_(t-1)n + dt x_t B_tn and dt = softplus(dt_t + dt_bias).

    x, dt, z: (t, d), B, C: (t, n), all float32 or all bfloat16, any token stride. A: (n, d) float32 contiguous,
    -exp(A_log) transposed; n 1 to 256. D, dt_bias: (d,) float32. D, z, dt_bias: None omits the term. state:
    (num_slots, n, d) float32, any slot stride. Returns (t, d) in x's dtype. A decode step is this op on sequences of
    one token. Raises ValueError.
    """
    require_cpu(x, "x")
    slots = state, ragged.num_tokens, ragged.max_slot
    arguments, out = scan_arguments(x, dt, A, B, C, D, z, dt_bias, *slots, MAX_D_STATE)
    _C.selective_scan(ragged=ragged.params, num_threads=num_threads(), **arguments)
    return out
