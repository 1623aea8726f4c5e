"""The residual stream on a CUDA device: see apcbatch.kernels.cpu.residual."""

from __future__ import annotations

import torch

from apcbatch.kernels.cuda.norm import add_rms_norm_, rms_norm
from apcbatch.kernels.layer import PreNorm, Residual


def residual(begin: torch.Tensor, present: torch.Tensor | None = None) -> Residual:
    """The stream of a pass. begin: (t, h) float32, changed by the pass. present: see Residual."""
    return Residual(begin, begin, present)


def normed(residual: Residual, norm: PreNorm, dtype: torch.dtype) -> torch.Tensor:
    """sum += delta, then its norm (t, h) in `dtype`."""
    if residual.has_delta:
        return add_rms_norm_(residual.sum, residual.delta, norm.weight, norm.eps, dtype)
    return rms_norm(residual.sum, norm.weight, norm.eps, dtype)
