"""Angles of the rotary position embedding. Su et al., "RoFormer", arXiv 2104.09864, section 3.2.

An angle is an integer number of 2^-64 turns, so that the angle of any position is exact and the same on every machine.
"""

from __future__ import annotations

from decimal import Decimal, localcontext

import torch

TURN_BITS = 64
_TWO_PI = Decimal("6.283185307179586476925286766559005768394338798750211641949889")


def rotary_steps(rotary_dim: int, theta: float) -> torch.Tensor:
    """Return the angle between two positions for each pair of columns, theta^(-2i / rotary_dim) radians, as
    (rotary_dim / 2,) int64 in 2^-64 turns. Raises ValueError unless rotary_dim is even and theta at least 1."""
    if rotary_dim < 0 or rotary_dim % 2 or not 1 <= theta < float("inf"):
        raise ValueError(
            f"rotary_dim must be even, and theta a finite number of at least 1; they are {rotary_dim} and {theta}"
        )
    with localcontext() as context:
        context.prec = 60  # the C library's power function differs between machines in the last bit of a double
        turn = Decimal(2**TURN_BITS) / _TWO_PI
        steps = [
            int((turn * Decimal(theta) ** (Decimal(-2 * i) / rotary_dim)).to_integral_value())
            for i in range(rotary_dim // 2)
        ]
    return torch.tensor(steps, dtype=torch.int64)
