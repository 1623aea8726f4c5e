"""Whether numbers are finite. Must not know: what they mean."""

from __future__ import annotations

import math

import torch


def finite_rows(rows: torch.Tensor) -> torch.Tensor:
    """Whether each row of (r, n) holds neither NaN nor infinity: (r,) bool on the same device. A maximum and a minimum
    tell: both are NaN where one number is, and they are read several times faster than `isfinite` looks at each."""
    return rows.amax(1).isfinite() & rows.amin(1).isfinite()


def largest(numbers: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, (), or NaN where a number is NaN: it tells as much, in one kernel of a device."""
    found: torch.Tensor = torch.linalg.vector_norm(numbers, math.inf)
    return found
