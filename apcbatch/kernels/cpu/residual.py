"""Residual stream on the CPU, and the pre-norm of each sub-block."""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import require_matrix, require_parameter
from apcbatch.kernels.cpu.norm import add_rms_norm_, rms_norm
from apcbatch.kernels.layer import PreNorm, Residual


def residual(begin: torch.Tensor, present: torch.Tensor | None = None) -> Residual:
    """Make the residual stream of a pass. begin: (t, h) float32 contiguous, the embeddings, overwritten by the pass.
    present: None, as no row is padding on the CPU. Raises ValueError."""
    if present is not None:
        raise ValueError("all rows of a pass on the CPU must be there; present must be None")
    require_matrix(begin, "the residual")
    require_parameter(begin, "the residual", tuple(begin.shape), torch.float32)
    return Residual(begin, torch.empty_like(begin))


def normed(residual: Residual, norm: PreNorm, dtype: torch.dtype) -> torch.Tensor:
    """Add the pending delta to the sum in place, and return the sum's norm, (t, h) in `dtype`."""
    if residual.has_delta:
        return add_rms_norm_(residual.sum, residual.delta, norm.weight, norm.eps, dtype)
    return rms_norm(residual.sum, norm.weight, norm.eps, dtype)


def norm_plan(norm: PreNorm, hidden: int) -> _C.PreNorm:
    """Make the compiled module's handle of a norm of `hidden` columns. It holds an address only: the caller keeps the
    norm alive. Raises ValueError."""
    require_parameter(norm.weight, "norm", (hidden,), torch.float32)
    return _C.PreNorm(norm.weight.data_ptr(), norm.eps)


def addresses(residual: Residual, hidden: int) -> tuple[int, int, bool]:
    """Return (address of sum, address of delta, has_delta) for a fused sub-block, and set has_delta, as the sub-block
    overwrites delta with its output. Raises ValueError unless the residual has `hidden` columns."""
    if residual.sum.shape[1] != hidden:
        raise ValueError(f"the residual must have the part's {hidden} columns; it is {tuple(residual.sum.shape)}")
    had_delta, residual.has_delta = residual.has_delta, True
    return residual.sum.data_ptr(), residual.delta.data_ptr(), had_delta
