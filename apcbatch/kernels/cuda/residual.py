"""Residual stream on a CUDA device: see apcbatch.kernels.cpu.residual."""

from __future__ import annotations

import torch

from apcbatch.kernels.cuda.norm import add_rms_norm_, rms_norm
from apcbatch.kernels.layer import PreNorm, Residual


def residual(begin: torch.Tensor, present: torch.Tensor | None = None) -> Residual:
    """Make the residual stream of a pass. begin: (t, h) float32, the embeddings, overwritten by the pass. present: see
    Residual."""
    return Residual(begin, begin, present)


def normed(residual: Residual, norm: PreNorm, dtype: torch.dtype) -> torch.Tensor:
    """Add the pending delta to the sum in place, and return the sum's norm, (t, h) in `dtype`."""
    if residual.has_delta:
        return add_rms_norm_(residual.sum, residual.delta, norm.weight, norm.eps, dtype)
    return rms_norm(residual.sum, norm.weight, norm.eps, dtype)
