"""Matrix product of the CPU: pack the weights once, then compute y = x W^T (* scale) (+ bias) for any number of rows.

Invariant: a row of y depends on that row of x alone. Each element is one float32 accumulator: fused multiply-adds over
the inputs in ascending order, then times the scale, plus the bias, then one rounding. On avx512bf16 and amx, one step
takes several bfloat16 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import (
    DTYPE_CODES,
    address,
    dtype_code,
    require_cpu,
    require_indices,
    require_matrix,
    require_parameter,
    view,
)
from apcbatch.kernels.encoded_rows import Codes, EncodedRows
from apcbatch.kernels.processor import num_threads

PANEL_ROWS = 16
_RUN_CODES = {"int8": 1, "int4": 2, "fp8": 3}
_FP8_SCALE = 2.0**120
_MOST_MULTIPLIED = 2.0**110  # of scales that are multiplied by 2^16
PIECE_ROWS = 1 << 13  # of weights that are converted at a time; a multiple of the outputs of a panel


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """Weights (out_features, in_features) in the order that `linear` reads them. data: the packed weights. dtype:
    float32 or bfloat16, of codes after they are decoded. scale: (out,) float32, factors of the columns of y, or None.
    runs: (r, 7) int64, the runs of panels (PanelRun of csrc/linear.h) of weights of which some are codes; None: all are
    of `dtype`. plan: addresses and sizes for the compiled module, without a bias."""

    data: torch.Tensor
    out_features: int
    in_features: int
    dtype: torch.dtype
    scale: torch.Tensor | None = None
    runs: torch.Tensor | None = None
    plan: _C.Projection = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", projection(self, None))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weights: indices (k,) int64 in [0, out_features) -> (k, in_features) in the weights'
        dtype. See Linear. Raises ValueError for weights with codes."""
        if self.runs is not None:
            raise ValueError("rows of weights that stay encoded cannot be taken")
        indices = require_indices(indices, "indices", (indices.numel(),), self.out_features)
        rows = torch.empty(indices.numel(), self.in_features, dtype=self.dtype)
        _C.unpack_rows(self.plan, indices.data_ptr(), indices.numel(), rows.data_ptr(), num_threads())
        return rows


def pack_linear(
    weight: torch.Tensor | EncodedRows, scale: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> PackedLinear:
    """Copy weights into the order that `linear` reads. weight: (out, in), any row stride. scale: (out,) float32,
    factors of the columns of y. dtype: of the packed weights, float32 or bfloat16; by default the weight's own,
    bfloat16 of EncodedRows. Raises ValueError.

    Weights of another dtype are converted piece by piece, to avoid a converted copy of all of them.
    """
    if isinstance(weight, EncodedRows):
        return _pack_runs(weight, scale, dtype or torch.bfloat16)
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
    _pack(weight, dtype, code, data.data_ptr())
    return PackedLinear(data, out_features, in_features, dtype, scale)


def _pack(weight: torch.Tensor, dtype: torch.dtype, code: int, memory: int) -> None:
    """Copy weights (out, in) to packed memory."""
    out_features, in_features = weight.shape
    rows, columns = (out_features, in_features) if weight.dtype == dtype else (PIECE_ROWS, _C.BLOCK_INPUTS)
    for k in range(0, in_features, columns):
        block = memory + (_C.packed_bytes(out_features, k, code) if k else 0)
        for row in range(0, out_features, rows):
            piece = weight[row : row + rows, k : k + columns].to(dtype)
            outputs, inputs = piece.shape
            begin = block + (_C.packed_bytes(row, inputs, code) if row else 0)
            _C.pack_linear(view(piece, "weight"), outputs, inputs, begin, num_threads())


def _pack_runs(weight: EncodedRows, scale: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
    """Copy the rows of a matrix, some of them codes, into runs of panels."""
    out_features, in_features = weight.shape
    code = dtype_code(torch.empty(0, dtype=dtype), "weight")
    parts = list(weight.runs(PANEL_ROWS))
    if all(isinstance(part, torch.Tensor) for _, _, part in parts):
        return pack_linear(torch.cat([part for _, _, part in parts if isinstance(part, torch.Tensor)]), scale, dtype)
    runs = torch.zeros(len(parts), 7, dtype=torch.int64)
    begins, size, blocks = [], 0, [_in_blocks(part) if isinstance(part, Codes) else part for _, _, part in parts]
    for run, (begin, end, _), part in zip(runs, parts, blocks, strict=True):
        run[0], run[1] = begin // PANEL_ROWS, -(-end // PANEL_ROWS)
        begins.append(size)
        if isinstance(part, Codes):
            run[3:] = torch.tensor(
                [_RUN_CODES[part.kind], part.group, _kind_of_scales(part.scales), part.zeros is not None]
            )
            size += _C.code_bytes(in_features, run.data_ptr())
        else:
            size += _C.packed_bytes(end - begin, in_features, code)
        size = -(-size // 64) * 64
    data = torch.empty(size, dtype=torch.uint8)
    _C.want_huge_pages(data.data_ptr(), size)
    for run, at, part in zip(runs, begins, blocks, strict=True):
        run[2] = memory = data.data_ptr() + at
        if isinstance(part, torch.Tensor):
            _pack(part, dtype, code, memory)
            continue
        codes, scales = part.codes.contiguous(), part.scales.contiguous()
        zeros = None if part.zeros is None else part.zeros.contiguous()
        rows, stride = codes.shape
        _C.pack_codes(
            codes.data_ptr(),
            stride,
            scales.data_ptr(),
            address(zeros),
            rows,
            in_features,
            run.data_ptr(),
            num_threads(),
        )
    return PackedLinear(data, out_features, in_features, dtype, scale, runs)


def _kind_of_scales(scales: torch.Tensor) -> int:
    """Return Scales of csrc/linear.h."""
    if not bool(scales.abs().max() < _MOST_MULTIPLIED):
        return 0
    low_bits = scales.view(torch.int32)
    return 1 if not bool((low_bits & 0xFFFF).any()) else 2 if not bool((low_bits & 0x1FFF).any()) else 0


def _in_blocks(codes: Codes) -> Codes:
    """Return codes whose groups lie in blocks of inputs, with the factor that the kernels expect in scales of fp8."""
    scales, block = codes.scales, _C.BLOCK_INPUTS
    if codes.kind == "fp8":
        scales = scales * _FP8_SCALE
    if codes.group <= block and codes.group < codes.columns:
        return replace(codes, scales=scales)
    count = -(-codes.columns // block)
    repeats = count if codes.group >= codes.columns else codes.group // block
    scales, *rest = (one.repeat_interleave(repeats, 1)[:, :count] for one in (scales, codes.zeros) if one is not None)
    return replace(codes, group=block, scales=scales, zeros=rest[0] if rest else None)


def projection(packed: PackedLinear, bias: torch.Tensor | None) -> _C.Projection:
    """Make the compiled module's handle of packed weights and a contiguous float32 bias. It holds addresses only: the
    caller keeps the tensors alive."""
    return _C.Projection(
        out_features=packed.out_features,
        in_features=packed.in_features,
        weights=packed.data.data_ptr(),
        dtype=DTYPE_CODES[packed.dtype],
        scale=address(packed.scale),
        bias=address(bias),
        runs=address(packed.runs),
    )
