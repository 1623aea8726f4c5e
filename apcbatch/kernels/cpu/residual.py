"""The residual stream, and the RMS norm that every part of a layer begins with.

Must not know: what the parts compute. A part adds to the stream what the part before it left, norms the sum, and
leaves its own result to be added by the next.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import require_matrix, require_parameter
from apcbatch.kernels.cpu.norm import add_rms_norm_, rms_norm


class PreNorm:
    """The norm at the beginning of a part. weight: (h) float32 contiguous. Raises ValueError."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        require_parameter(weight, "weight", (weight.numel(),), torch.float32)
        self.weight, self.eps = weight, eps
        self.plan = _C.PreNorm(weight.data_ptr(), eps)


class Residual:
    """sum: (t, h) float32 contiguous, changed in place. delta: (t, h) float32, what is yet to be added to it, where
    has_delta says that there is something. Raises ValueError."""

    def __init__(self, begin: torch.Tensor) -> None:
        require_matrix(begin, "the residual")
        require_parameter(begin, "the residual", tuple(begin.shape), torch.float32)
        self.sum, self.delta, self.has_delta = begin, torch.empty_like(begin), False

    def normed(self, norm: PreNorm, dtype: torch.dtype) -> torch.Tensor:
        """sum += delta, then its norm (t, h) in `dtype`."""
        if self.has_delta:
            return add_rms_norm_(self.sum, self.delta, norm.weight, norm.eps, dtype)
        return rms_norm(self.sum, norm.weight, norm.eps, dtype)

    def rows(self, indices: torch.Tensor) -> Residual:
        """A copy of some of its rows: indices (r,) int64."""
        taken = type(self)(self.sum[indices])
        taken.delta, taken.has_delta = self.delta[indices], self.has_delta
        return taken

    def leave(self, delta: torch.Tensor) -> None:
        """The next part adds this: (t, h) float32 contiguous."""
        require_parameter(delta, "delta", tuple(self.sum.shape), torch.float32)
        self.delta, self.has_delta = delta, True

    def addresses(self, hidden: int) -> tuple[int, int, bool]:
        """For a fused part of `hidden` columns, whose result takes the place of delta. Raises ValueError."""
        if self.sum.shape[1] != hidden:
            raise ValueError(
                f"the residual must have the part's {hidden} columns; it is {tuple(self.sum.shape)}"
            )
        had_delta, self.has_delta = self.has_delta, True
        return self.sum.data_ptr(), self.delta.data_ptr(), had_delta
