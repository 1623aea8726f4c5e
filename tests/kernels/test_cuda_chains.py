"""Fixed-order products on a CUDA device: right against float64, and the same bits for any number of rows, whichever
kernel makes them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from apcbatch.kernels.cuda import fixed_order
from apcbatch.kernels.cuda.fixed_order import FixedOrderProducts, pieces_of

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    (1, 16),
    (1, 2048),
    (7, 48),
    (3, 4096),
    (16, 4096),
    (192, 5120),
    (81, 1040),
    (305, 272),
    (2560, 160),
    (5000, 1024),
    (1100, 2064),
    (2400, 1024),
]  # out, in


def wide(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of many magnitudes, so that another order of sums has other bits."""
    numbers = torch.randn(*shape, device=DEVICE) * torch.exp2(torch.randint(-6, 7, shape, device=DEVICE).float())
    return numbers.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_has_the_bits_that_it_has_alone(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Catches a kernel that adds in another order, one that splits the inputs, rows and columns that are left out, and
    rows that begin where a kernel cannot read them."""
    weight, x = wide(outputs, inputs, dtype=dtype), wide(300, inputs, dtype=dtype)
    chained = FixedOrderProducts(DEVICE)
    assert chained.takes(weight)
    pieces = pieces_of(weight)

    def product(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return chained.product(x, weight, out_dtype, pieces)

    for out_dtype in {dtype, torch.float32}:
        y = product(x, weight, out_dtype)
        exact = x.double() @ weight.double().t()
        assert (y.double() - exact).norm() <= 4e-3 * exact.norm()
        alone = torch.cat([product(row, weight, out_dtype) for row in x[:12].split(1)])
        assert torch.equal(alone, y[:12])
        for rows in (2, 7, 8, 9, 33, 129, *(random.randrange(1, 300) for _ in range(4))):
            begin = random.randrange(300 - rows + 1)
            part = x[begin : begin + rows]
            assert torch.equal(product(part, weight, out_dtype), y[begin : begin + rows]), rows
        columns = torch.cat([x, x], dim=1)[:, :inputs]
        assert torch.equal(product(columns[:5], weight, out_dtype), y[:5])
        assert torch.equal(product(columns[:50], weight, out_dtype), y[:50])
        shifted = x.new_empty(50 * inputs + 1)[1:].view(50, inputs).copy_(x[:50])
        assert torch.equal(product(shifted, weight, out_dtype), y[:50])


def test_many_rows_of_two_pieces_have_the_bits_of_few() -> None:
    """Catches pieces that the library adds to the result in another order, to what was there before, or rounded."""
    weight, x = wide(2400, 1024, dtype=torch.bfloat16), wide(1500, 1024, dtype=torch.bfloat16)
    assert pieces_of(weight) == 2
    chained = FixedOrderProducts(DEVICE)
    for out_dtype in (torch.float32, torch.bfloat16):
        y = chained.product(x, weight, out_dtype, 2)
        few = [chained.product(part, weight, out_dtype, 2) for part in x.split(32)]
        assert torch.equal(torch.cat(few), y)


def test_no_rows() -> None:
    """Catches a launch of no blocks."""
    weight = wide(32, 64, dtype=torch.bfloat16)
    assert FixedOrderProducts(DEVICE).product(weight[:0], weight, torch.float32, 1).shape == (0, 32)


class Spoilt:
    """The extension with a library whose first kernel, or whose only one, multiplies by other weights."""

    def __init__(self, weight: torch.Tensor, alone: bool) -> None:
        self._real, self._weight, self._alone, self.asked = fixed_order.extension(), weight, alone, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def Product(self, *arguments: int) -> Any:  # noqa: N802
        self._arguments = arguments
        return self._real.Product(*arguments)

    def library_choices(self, product: Any, in_turn: bool, most: int) -> list[bytes]:
        self._favourite, *rest = self._real.library_choices(product, in_turn, most)
        return [b"spoilt"] if self._alone else [b"spoilt", self._favourite, *rest]

    def library_product(self, product: Any, in_turn: bool, choice: bytes, stream: int) -> bool:
        if choice == b"spoilt":
            self.asked += 1
            dtypes, addresses = self._arguments[:4], self._arguments[5:]
            other = self._real.Product(*dtypes, self._weight.data_ptr(), *addresses)
            return bool(self._real.library_product(other, in_turn, self._favourite, stream))
        return bool(self._real.library_product(product, in_turn, choice, stream))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_of_other_bits_is_not_taken(dtype: torch.dtype, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a library that is trusted to sum in fixed order: here its first kernel does not, or none does."""
    weight, x = wide(320, 256, dtype=dtype), wide(100, 256, dtype=dtype)
    pieces = 2 if dtype == torch.bfloat16 else 1
    expected = FixedOrderProducts(DEVICE).product(x, weight, torch.float32, pieces)
    other = weight.clone()
    other[-1] *= 1.5
    spoilt = Spoilt(other, alone)
    monkeypatch.setattr(fixed_order, "extension", lambda: spoilt)
    assert torch.equal(FixedOrderProducts(DEVICE).product(x, weight, torch.float32, pieces), expected)
    assert spoilt.asked == 1
