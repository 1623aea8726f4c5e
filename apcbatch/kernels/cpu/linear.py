"""Matrix product of the CPU: pack the weights once, then compute y = x W^T (* scale) (+ bias) for any number of rows.

Invariant: a row of y depends on that row of x alone. Each element is one float32 accumulator: fused multiply-adds over
the inputs in ascending order, then times the scale, plus the bias, then one rounding. On avx512bf16 and amx, one step
takes several bfloat16 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import (
    address,
    dtype_code,
    require_cpu,
    require_indices,
    require_matrix,
    require_parameter,
    view,
)
from apcbatch.kernels.processor import num_threads

PIECE_ROWS = 1 << 13  # of weights that are converted at a time; a multiple of the outputs of a panel


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """Weights (out_features, in_features) in the order that `linear` reads them. data: the packed weights. dtype:
    float32 or bfloat16. scale: (out,) float32, factors of the columns of y, or None. plan: addresses and sizes for the
    compiled module, without a bias."""

    data: torch.Tensor
    out_features: int
    in_features: int
    dtype: torch.dtype
    scale: torch.Tensor | None = None
    plan: _C.Projection = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", projection(self, None))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weights: indices (k,) int64 in [0, out_features) -> (k, in_features) in the weights'
        dtype. See Linear."""
        indices = require_indices(indices, "indices", (indices.numel(),), self.out_features)
        rows = torch.empty(indices.numel(), self.in_features, dtype=self.dtype)
        _C.unpack_rows(self.plan, indices.data_ptr(), indices.numel(), rows.data_ptr(), num_threads())
        return rows


def pack_linear(
    weight: torch.Tensor, scale: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> PackedLinear:
    """Copy weights into the order that `linear` reads. weight: (out, in), any row stride. scale: (out,) float32,
    factors of the columns of y. dtype: of the packed weights, float32 or bfloat16; by default the weight's own. Raises
    ValueError.

    Weights of another dtype are converted piece by piece, to avoid a converted copy of all of them.
    """
    require_cpu(weight, "weight")
    require_matrix(weight, "weight")
    out_features, in_features = weight.shape
    if out_features == 0 or in_features == 0:
        raise ValueError(f"weight must have at least one row and one column; it is {tuple(weight.shape)}")
    if scale is not None:
        require_parameter(scale, "scale", (out_features,), torch.float32)
    dtype = dtype or weight.dtype
    code = dtype_code(weight.new_empty(0, dtype=dtype), "weight")
    num_bytes = _C.packed_bytes(out_features, in_features, code)
    data = torch.empty(num_bytes // dtype.itemsize, dtype=dtype)
    _C.want_huge_pages(data.data_ptr(), num_bytes)
    rows, columns = (out_features, in_features) if weight.dtype == dtype else (PIECE_ROWS, _C.BLOCK_INPUTS)
    for k in range(0, in_features, columns):
        block = data.data_ptr() + (_C.packed_bytes(out_features, k, code) if k else 0)
        for row in range(0, out_features, rows):
            piece = weight[row : row + rows, k : k + columns].to(dtype)
            outputs, inputs = piece.shape
            begin = block + (_C.packed_bytes(row, inputs, code) if row else 0)
            _C.pack_linear(view(piece, "weight"), outputs, inputs, begin, num_threads())
    return PackedLinear(data, out_features, in_features, dtype, scale)


def projection(packed: PackedLinear, bias: torch.Tensor | None) -> _C.Projection:
    """Make the compiled module's handle of packed weights and a contiguous float32 bias. It holds addresses only: the
    caller keeps the tensors alive."""
    return _C.Projection(
        out_features=packed.out_features,
        in_features=packed.in_features,
        weights=packed.data.data_ptr(),
        dtype=dtype_code(packed.data, "weight"),
        scale=address(packed.scale),
        bias=address(bias),
    )
