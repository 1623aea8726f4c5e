"""RMS norm, alone or after the residual addition, and the SwiGLU product, on the CPU.

Invariant: a row of the result depends on that row of the arguments alone. Formulas: Zhang and Sennrich, "Root mean
square layer normalization", arXiv 1910.07467, equation 4; Shazeer, "GLU variants improve transformer", arXiv
2002.05202.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import num_threads, require_cpu
from apcbatch.kernels.row_arguments import gated_arguments, norm_arguments


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight in float32, rounded once.

    x: (t, h) float32 or bfloat16, any row stride. weight: (h,); None: ones. Returns (t, h) in out_dtype. Raises
    ValueError.
    """
    require_cpu(x, "x")
    return _rms_norm(x, None, weight, eps, out_dtype)


def add_rms_norm_(
    residual: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Add delta to the residual in place, then compute its rms_norm.

    residual: (t, h) float32, any row stride. delta: (t, h) float32 or bfloat16, any row stride. weight, eps,
    out_dtype and the result: as in rms_norm. Raises ValueError.
    """
    require_cpu(residual, "residual")
    return _rms_norm(residual, delta, weight, eps, out_dtype)


def _rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    arguments, y, _alive = norm_arguments(x, delta, weight, eps, out_dtype)
    _C.rms_norm(*arguments, num_threads())
    return y


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up in float32, rounded once.

    gate, up: (t, f), both float32 or both bfloat16, any row stride. Returns (t, f) in that dtype. Raises ValueError.
    """
    require_cpu(gate, "gate")
    arguments, y = gated_arguments(gate, up)
    _C.silu_mul(*arguments, num_threads())
    return y
