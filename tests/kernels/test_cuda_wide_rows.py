"""Products with 33 to 128 rows by a kernel of their own: the bits that the rows have in products with few rows."""

from __future__ import annotations

import random

import pytest
import torch

from apcbatch.kernels.cuda import chains
from apcbatch.kernels.cuda.chains import Chains, pieces_of
from apcbatch.kernels.cuda.extension import current_stream, extension
from tests.kernels.recurrent import fresh_seed, same_bits
from tests.kernels.test_cuda_chains import DEVICE, wide

pytestmark = pytest.mark.cuda
# out, in: fewer rows than blocks, an odd number, a last slice of 16 to 48 inputs, every width of a tile, tiles one
# after the other, and 1, 2, 4 and 8 pieces
SHAPES = [
    (1, 16),
    (7, 48),
    (81, 1040),
    (192, 5120),
    (305, 272),
    (1024, 4096),
    (2400, 1056),
    (2561, 160),
    (5120, 80),
    (10240, 320),
    (20000, 96),
    (28672, 208),
    (50281, 64),
]


def few(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The product, some rows after the others."""
    product, pieces = Chains(DEVICE).product, pieces_of(weight)
    return torch.cat([product(part, weight, out_dtype, pieces) for part in x.split(extension().MOST_FEW_ROWS)])


def product(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> object:
    return chains._product(x, weight, y, pieces_of(weight))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_have_the_bits_of_few_rows(outputs: int, inputs: int) -> None:
    """Catches rows and columns that are left out or written beyond the ends, inputs of the next piece, pieces added in
    another order, x of another block, and memory that is read before it is there."""
    fresh_seed()
    weight, x = wide(outputs, inputs, dtype=torch.bfloat16), wide(128, inputs + 8, dtype=torch.bfloat16)
    x = random.choice([x[:, :inputs].contiguous(), x[:, :inputs]])
    for out_dtype in (torch.bfloat16, torch.float32):
        expected = few(x, weight, out_dtype)
        for rows in (1, 33, 64, 65, 128, *random.sample(range(34, 128), 3)):
            y = torch.full((rows + 1, outputs), float("nan"), dtype=out_dtype, device=DEVICE)
            asked = product(x[:rows], weight, y[:rows])
            assert extension().takes_wide_rows(asked)
            extension().wide_rows_product(asked, current_stream())
            assert same_bits(y[:rows], expected[:rows]), rows
            assert y[rows].isnan().all()


def test_a_captured_product_follows_its_inputs() -> None:
    """Catches a product that begins before the one that makes its x has ended, or ends before it is all there."""
    fresh_seed()
    first, second = (wide(2560, 5120, dtype=torch.bfloat16), wide(5120, 2560, dtype=torch.bfloat16))
    x, chained = wide(100, 5120, dtype=torch.bfloat16), Chains(DEVICE)

    def both(x: torch.Tensor) -> torch.Tensor:
        between = chained.product(x, first, torch.bfloat16, pieces_of(first))
        return chained.product(between * 2**-8, second, torch.float32, pieces_of(second))

    both(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = both(x)
    for _ in range(10):
        x.copy_(wide(100, 5120, dtype=torch.bfloat16))
        y.fill_(float("nan"))
        graph.replay()
        expected = few(few(x, first, torch.bfloat16) * 2**-8, second, torch.float32)
        assert same_bits(y, expected)


def test_take_only_what_they_can() -> None:
    """More rows than two warpgroups have, float32, and rows that a tensor copy cannot read."""
    weight, x = wide(64, 48, dtype=torch.bfloat16), wide(129, 64, dtype=torch.bfloat16)
    y = torch.empty(129, 64, device=DEVICE)

    def taken(x: torch.Tensor, weight: torch.Tensor) -> bool:
        return bool(extension().takes_wide_rows(product(x, weight, y[: len(x)])))

    assert taken(x[:128, :48], weight)
    assert not taken(x[:, :48], weight)
    assert not taken(x[:40, 1:49], weight)
    assert not taken(x.float()[:40, :48].contiguous(), weight.float())
    assert not taken(wide(40, 52, dtype=torch.bfloat16)[:, :48], weight)
