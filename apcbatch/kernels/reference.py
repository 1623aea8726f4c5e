"""The ops in plain PyTorch, one token at a time: the specification that the kernels are tested against.

Must not know: csrc. Same arguments and results as in apcbatch.kernels.ops. It computes in float32, and in
float64 where the activations are float64, which serves as the measure for tolerances.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from apcbatch.kernels.ragged import Ragged


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """out_t = silu(bias + sum_k weight_k x_(t - w + 1 + k)); see apcbatch.kernels.scan."""
    compute = torch.promote_types(x.dtype, torch.float32)
    past = weight.shape[1] - 1
    taps = weight.to(compute).t()  # (d, w) -> (w, d)
    out = torch.empty_like(x)

    def step(token: int, window: torch.Tensor) -> torch.Tensor:
        window = torch.cat([window, x[token : token + 1]])  # (w, d): the last w raw inputs
        total = (taps * window.to(compute)).sum(0)
        out[token] = F.silu(total if bias is None else total + bias.to(compute)).to(x.dtype)
        return window[window.shape[0] - past :]

    _run(ragged, state, step)
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
    """h = exp(dt A) h + dt x B; y = (D x + sum_n C h) silu(z), dt after bias and softplus.

    Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752,
    section 3.2.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    x_, dt_, B_, C_, A_ = (value.to(compute) for value in (x, dt, B, C, A))
    dt_ = F.softplus(dt_ if dt_bias is None else dt_ + dt_bias.to(compute))  # (t, d)
    out = torch.empty_like(x)

    def step(token: int, h: torch.Tensor) -> torch.Tensor:
        decay = torch.exp(dt_[token] * A_)  # (d), (n, d) -> (n, d)
        h = decay * h.to(compute) + (dt_[token] * x_[token]) * B_[token, :, None]
        y = (C_[token, :, None] * h).sum(0)
        if D is not None:
            y = y + D.to(compute) * x_[token]
        if z is not None:
            y = y * F.silu(z[token].to(compute))
        out[token] = y.to(x.dtype)
        return h

    _run(ragged, state, step)
    return out


def _run(
    ragged: Ragged, state: torch.Tensor, step: Callable[[int, torch.Tensor], torch.Tensor]
) -> None:
    """Take every sequence through its tokens: carry = step(token, carry), between the slots of the batch."""
    offsets, cuts = ragged.cu_seqlens.tolist(), ragged.snapshot_cu.tolist()
    for sequence in range(ragged.num_sequences):
        initial, final = int(ragged.initial_slots[sequence]), int(ragged.final_slots[sequence])
        carry = torch.zeros_like(state[0]) if initial < 0 else state[initial].clone()
        kept = slice(cuts[sequence], cuts[sequence + 1])
        slot_after = dict(
            zip(ragged.snapshot_positions[kept].tolist(), ragged.snapshot_slots[kept].tolist(), strict=True)
        )
        for token in range(offsets[sequence], offsets[sequence + 1]):
            carry = step(token, carry)
            consumed = token + 1 - offsets[sequence]
            if consumed in slot_after:
                state[slot_after[consumed]] = carry
        if final >= 0:
            state[final] = carry
