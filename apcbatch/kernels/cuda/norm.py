"""RMS norm, alone or with the residual addition before it, and the SwiGLU product, on a CUDA device. The same arguments
and results as on the CPU (apcbatch.kernels.cpu.norm), and float16 too.

Must not know: models. Invariant: a row of the result depends on that row of the arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apcbatch.kernels.arguments import (
    dtype_code,
    float_vector,
    require_alike,
    require_matrix,
    require_one_dtype,
    require_sums,
    row_stride,
)
from apcbatch.kernels.cuda.extension import DTYPE_CODES, current_stream, extension


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    """See apcbatch.kernels.cpu.norm."""
    return rms_norms([x], [weight], eps, out_dtype)[0]


def rms_norms(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None], eps: float, out_dtype: torch.dtype
) -> list[torch.Tensor]:
    """`rms_norm` of each x with its weight: at once where that can be."""
    norms, ys = zip(
        *(_norm(x, None, weight, eps, out_dtype) for x, weight in zip(xs, weights, strict=True)), strict=True
    )
    extension().rms_norms(list(norms), current_stream())
    return list(ys)


def add_rms_norm_(
    residual: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See apcbatch.kernels.cpu.norm."""
    require_sums(residual, delta)
    norm, y = _norm(residual, delta, weight, eps, out_dtype)
    extension().rms_norms([norm], current_stream())
    return y


def _norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[object, torch.Tensor]:
    """The norm as _CUDA takes it, and where its result will be."""
    require_matrix(x, "x")
    t, h = x.shape
    if weight is not None:
        weight = float_vector(weight, "weight", h, x, "x")
    y = torch.empty((t, h), dtype=out_dtype, device=x.device)
    addend = (0, 0, 0) if delta is None else (
        delta.data_ptr(), row_stride(delta, "delta"), dtype_code(delta, "delta", DTYPE_CODES)
    )  # fmt: skip
    norm = extension().Norm(
        t,
        h,
        x.data_ptr(),
        row_stride(x, "x"),
        dtype_code(x, "x", DTYPE_CODES),
        *addend,
        0 if weight is None else weight.data_ptr(),
        eps,
        y.data_ptr(),
        dtype_code(y, "out_dtype", DTYPE_CODES),
    )
    return norm, y


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See apcbatch.kernels.cpu.norm."""
    require_matrix(gate, "gate")
    require_alike(up, "up", gate, "gate")
    require_one_dtype(gate, "gate", up, "up")
    t, f = gate.shape
    y = torch.empty((t, f), dtype=gate.dtype, device=gate.device)
    extension().silu_mul(
        t,
        f,
        gate.data_ptr(),
        row_stride(gate, "gate"),
        up.data_ptr(),
        row_stride(up, "up"),
        y.data_ptr(),
        dtype_code(gate, "gate", DTYPE_CODES),
        current_stream(),
    )
    return y
