"""The residual stream on the CPU, and the norm that every part of a layer begins with."""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import require_matrix, require_parameter
from apcbatch.kernels.cpu.norm import add_rms_norm_, rms_norm
from apcbatch.kernels.layer import PreNorm, Residual


def residual(begin: torch.Tensor, present: torch.Tensor | None = None) -> Residual:
    """The stream of a pass. begin: (t, h) float32 contiguous, changed by the pass; all of its rows are there. Raises
    ValueError."""
    if present is not None:
        raise ValueError("all rows of a pass on the CPU must be there; present must be None")
    require_matrix(begin, "the residual")
    require_parameter(begin, "the residual", tuple(begin.shape), torch.float32)
    return Residual(begin, torch.empty_like(begin))


def normed(residual: Residual, norm: PreNorm, dtype: torch.dtype) -> torch.Tensor:
    """sum += delta, then its norm (t, h) in `dtype`."""
    if residual.has_delta:
        return add_rms_norm_(residual.sum, residual.delta, norm.weight, norm.eps, dtype)
    return rms_norm(residual.sum, norm.weight, norm.eps, dtype)


def norm_plan(norm: PreNorm, hidden: int) -> _C.PreNorm:
    """A norm's address for a fused part of `hidden` columns; whoever holds it keeps the norm alive. Raises
    ValueError."""
    require_parameter(norm.weight, "norm", (hidden,), torch.float32)
    return _C.PreNorm(norm.weight.data_ptr(), norm.eps)


def addresses(residual: Residual, hidden: int) -> tuple[int, int, bool]:
    """Of sum and delta, and whether there is a delta, for a fused part of `hidden` columns, whose result takes the
    place of delta. Raises ValueError."""
    if residual.sum.shape[1] != hidden:
        raise ValueError(f"the residual must have the part's {hidden} columns; it is {tuple(residual.sum.shape)}")
    had_delta, residual.has_delta = residual.has_delta, True
    return residual.sum.data_ptr(), residual.delta.data_ptr(), had_delta
