"""The packed matrix product of the CPU: weights packed once, then y = x W^T (+ bias) for any number of rows.

Must not know: models, which projection it is. Invariant: a row of y depends on that row of x alone; each
element is one float32 accumulator, fused multiply-adds over the inputs in ascending order (bfloat16 in steps of
several on avx512bf16 and amx), then the bias, and one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import (
    address,
    dtype_code,
    float_vector,
    num_threads,
    require_cpu,
    require_indices,
    require_matrix,
    view,
)


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """Weights (out_features, in_features) in the order `linear` reads them; `data` is their bytes, and `plan` how
    the compiled module finds them."""

    data: torch.Tensor
    out_features: int
    in_features: int
    dtype: torch.dtype
    plan: _C.Projection = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", projection(self, None))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weights: indices (k,) int64 in [0, out_features) -> (k, in_features) in their dtype.

        Lets an embedding and an output projection that are tied share one copy.
        """
        indices = require_indices(indices, "indices", (indices.numel(),), self.out_features)
        rows = torch.empty(indices.numel(), self.in_features, dtype=self.dtype)
        _C.unpack_rows(self.plan, indices.data_ptr(), indices.numel(), rows.data_ptr(), num_threads())
        return rows


def pack_linear(weight: torch.Tensor) -> PackedLinear:
    """weight: (out, in) float32 or bfloat16, any row stride; it may be freed afterwards."""
    require_cpu(weight, "weight")
    require_matrix(weight, "weight")
    out_features, in_features = weight.shape
    if out_features == 0 or in_features == 0:
        raise ValueError(f"weight must have at least one row and one column; it is {tuple(weight.shape)}")
    code = dtype_code(weight, "weight")
    count = _C.packed_bytes(out_features, in_features, code) // weight.element_size()
    data = torch.empty(count, dtype=weight.dtype)
    _C.pack_linear(view(weight, "weight"), out_features, in_features, data.data_ptr(), num_threads())
    return PackedLinear(data, out_features, in_features, weight.dtype)


def projection(packed: PackedLinear, bias: torch.Tensor | None) -> _C.Projection:
    """The addresses of packed weights and a contiguous float32 bias; whoever holds them keeps both alive."""
    return _C.Projection(
        out_features=packed.out_features,
        in_features=packed.in_features,
        weights=packed.data.data_ptr(),
        dtype=dtype_code(packed.data, "weight"),
        bias=address(bias),
    )


def linear(
    x: torch.Tensor,
    packed: PackedLinear,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T (+ bias), accumulated in float32.

    x: (t, in) float32 or bfloat16, any row stride. out_dtype: float32 or bfloat16, x's if None. bias: (out)
    float32 or bfloat16. Returns (t, out). With bfloat16 weights a float32 x is first rounded to bfloat16.
    Raises ValueError.
    """
    require_cpu(x, "x")
    require_matrix(x, "x")
    t, in_features = x.shape
    if in_features != packed.in_features:
        raise ValueError(f"x must have {packed.in_features} columns, the weight's inputs; it is {tuple(x.shape)}")
    plan = packed.plan
    if bias is not None:
        bias = float_vector(bias, "bias", packed.out_features, x, "y")
        plan = projection(packed, bias)
    y = torch.empty(t, packed.out_features, dtype=out_dtype or x.dtype)
    _C.linear(t, view(x, "x"), plan, view(y, "out_dtype"), num_threads())
    return y
