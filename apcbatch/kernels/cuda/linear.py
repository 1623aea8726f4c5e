"""Matrix product on a CUDA device: y = x W^T (+ bias).

Invariant: with exact weights, a row of y depends on that row of x alone. With inexact weights this holds for
fixed-order products of up to FIXED_ORDER_ROWS rows. For more rows, cuBLAS picks its kernel by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from apcbatch.kernels.arguments import DTYPE_CODES, dtype_code
from apcbatch.kernels.cuda.coded import CodedWeight, coded_weight
from apcbatch.kernels.cuda.extension import current_stream, extension
from apcbatch.kernels.cuda.fixed_order import FixedOrderProducts, pieces_of
from apcbatch.kernels.encoded_rows import EncodedRows

FIXED_ORDER_ROWS = 128  # up to this number, inexact products use fixed order too, as it is no slower
EXACT_ROWS = 128  # rows per call of exact products without fixed order


@dataclass(frozen=True, eq=False)
class DeviceLinear:
    """Weights (out_features, in_features) on a CUDA device: a tensor in the checkpoint's order, or codes.

    exact: whether a row's bits must not depend on the other rows. fixed_order: the device's fixed-order products; None
    if they do not support these weights. pieces: number of pieces of the inputs, each with its own sum (see
    apcbatch.kernels.cuda.fixed_order). scale: (out,) float32, factors of the float32 sums, or None.
    """

    weight: torch.Tensor | CodedWeight
    exact: bool
    fixed_order: FixedOrderProducts | None
    pieces: int = 1
    scale: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def fixed_order_for(self, rows: int) -> FixedOrderProducts | None:
        """Return the fixed-order products if they multiply this number of rows; None if torch.mm does."""
        return self.fixed_order if self.exact or rows <= FIXED_ORDER_ROWS else None

    @cached_property
    def unscaled(self) -> DeviceLinear:
        """The same weights without their scale."""
        return replace(self, scale=None)

    def in_one_piece(self) -> DeviceLinear:
        """Return the same weights with one sum over all inputs."""
        return replace(self, pieces=1)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weights: indices (k,) int64 -> (k, in_features), for a tied embedding."""
        weight = self.weight.decoded() if isinstance(self.weight, CodedWeight) else self.weight
        return weight[indices]


def pack_linear(
    weight: torch.Tensor | EncodedRows,
    exact: bool,
    products: FixedOrderProducts,
    scale: torch.Tensor | None = None,
) -> DeviceLinear:
    """Prepare weights for `linear`. weight: (out, in), any stride; encoded ones stay so where the kernels take them.
    exact, scale: see DeviceLinear. products: those of the weights' device. Raises ValueError unless the weights are
    float32 or bfloat16."""
    given = coded_weight(weight, products.scratch) if isinstance(weight, EncodedRows) else weight
    scale = None if scale is None else scale.to(given.device)
    if isinstance(given, CodedWeight):
        return DeviceLinear(given, exact, products, pieces_of(given), scale)
    dtype_code(given, "weight")
    given = given.contiguous()
    if not products.takes(given):
        return DeviceLinear(given, exact, None, scale=scale)
    return DeviceLinear(given, exact, products, pieces_of(given), scale)


def product(x: torch.Tensor, packed: DeviceLinear, out_dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute y = x W^T (+ bias), accumulated in float32: see Ops.linear. out_dtype: x's or float32. bias: (out,),
    added to the rounded product in out_dtype. Raises ValueError unless x has the weights' dtype."""
    if x.dtype != packed.dtype:
        raise ValueError(f"x must be {packed.dtype}, as the weights are; it is {x.dtype}")
    products = packed.fixed_order_for(x.shape[0])
    summed = out_dtype if packed.scale is None else torch.float32
    weight = packed.weight
    if isinstance(weight, CodedWeight) and not (products and weight.takes(x.shape[0], packed.pieces)):
        weight = weight.decoded()
    if products is not None:
        y = products.product(x, weight, summed, packed.pieces)
    else:
        assert isinstance(weight, torch.Tensor)
        y = _padded_product(x, weight, summed) if packed.exact else _product(x, weight, summed)
    if packed.scale is not None:
        y = _scaled(y, packed.scale, out_dtype)
    return y if bias is None else y.add_(bias.to(y.dtype))


def _product(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    if out_dtype == x.dtype:
        return torch.mm(x, weight.t())
    return torch.mm(x, weight.t(), out_dtype=out_dtype)


def _scaled(sums: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply float32 sums (t, out) by a factor for each column, and round once."""
    y = sums if out_dtype == torch.float32 else torch.empty(sums.shape, dtype=out_dtype, device=sums.device)
    result = y.data_ptr(), DTYPE_CODES[out_dtype]
    with torch.cuda.device(sums.device):
        extension().scale_columns(sums.data_ptr(), scale.data_ptr(), *sums.shape, *result, current_stream())
    return y


def _padded_product(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply EXACT_ROWS rows at a time, the last block padded with zeros, so that cuBLAS uses the same kernel for any
    number of rows."""
    rows = x.shape[0]
    padded = x.new_zeros((rows + EXACT_ROWS - 1) // EXACT_ROWS * EXACT_ROWS, x.shape[1])
    padded[:rows] = x
    parts = [_product(part, weight, out_dtype) for part in torch.split(padded, EXACT_ROWS)]
    return torch.cat(parts)[:rows] if parts else x.new_empty((0, weight.shape[0]), dtype=out_dtype)
