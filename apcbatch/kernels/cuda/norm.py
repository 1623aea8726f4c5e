"""RMS norm, alone or after the residual addition, and the SwiGLU product, on a CUDA device.

Arguments and results: apcbatch.kernels.cpu.norm, plus float16. Invariant: a row of the result depends on that row of
the arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apcbatch.kernels.cuda.extension import DTYPE_CODES, current_stream, extension
from apcbatch.kernels.row_arguments import NormArguments, gated_arguments, norm_arguments


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    """See apcbatch.kernels.cpu.norm."""
    return rms_norms([x], [weight], eps, out_dtype)[0]


def rms_norms(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None], eps: float, out_dtype: torch.dtype
) -> list[torch.Tensor]:
    """Compute `rms_norm` of each x with its weight, in one launch if the kernel supports it."""
    norms = [
        norm_arguments(x, None, weight, eps, out_dtype, DTYPE_CODES) for x, weight in zip(xs, weights, strict=True)
    ]
    extension().rms_norms([_norm(arguments) for arguments, _, _ in norms], current_stream())
    return [y for _, y, _ in norms]


def add_rms_norm_(
    residual: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See apcbatch.kernels.cpu.norm."""
    arguments, y, _alive = norm_arguments(residual, delta, weight, eps, out_dtype, DTYPE_CODES)
    extension().rms_norms([_norm(arguments)], current_stream())
    return y


def _norm(of: NormArguments) -> object:
    """Make the _CUDA.Norm of checked arguments."""
    y, _, y_code = of.y
    return extension().Norm(of.t, of.h, *of.x, *(of.delta or (0, 0, 0)), of.weight, of.eps, y, y_code)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See apcbatch.kernels.cpu.norm."""
    (t, f, gates, ups, (result, _, code)), y = gated_arguments(gate, up, DTYPE_CODES)
    extension().silu_mul(t, f, *gates[:2], *ups[:2], result, code, current_stream())
    return y
