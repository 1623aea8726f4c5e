"""The packed matrix product: right against float64, and every row the same bits among any others."""

from __future__ import annotations

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.cpu import linear
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.processor import set_isa
from tests.effort import table
from tests.kernels.recurrent import strided

ops = CpuBackend()

pytestmark = pytest.mark.pairwise

FLOATS = [torch.float32, torch.bfloat16]
SHAPES = [  # t, in, out
    (1, 1, 1),
    (2, 1, 33),
    (3, 37, 75),
    (4, 48, 96),
    (5, 2, 15),
    (6, 255, 16),
    (7, 256, 17),
    (13, 257, 80),
    (16, 512, 31),
    (33, 513, 130),
    (70, 768, 48),
    (150, 260, 50),
    (301, 75, 5),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_matches_float64(shape, weight_dtype, isa):
    """A panel, tile or block edge that reads or writes beside its place; a lost bias; a k left out or used
    twice."""
    t, inputs, outputs = shape
    torch.manual_seed(t)
    weight, bias = strided(outputs, inputs, weight_dtype), torch.randn(outputs)
    packed = ops.pack_linear(weight)
    for x_dtype in FLOATS:
        x = strided(t, inputs, x_dtype)
        for bias_or_none in (None, bias):
            expected = reference.linear(x.double(), weight, bias=bias_or_none)
            for out_dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 8e-3)):
                y = ops.linear(x, packed, out_dtype=out_dtype, bias=bias_or_none)
                assert y.dtype == out_dtype
                error = (y.double() - expected).abs() / (expected.abs() + inputs**0.5)
                assert float(error.max()) < tolerance


@table("weight_dtype", FLOATS)
@table("inputs, outputs", [(300, 130), (1536, 80), (48, 1536), (768, 1031)])
def test_rows_do_not_depend_on_how_many_there_are(inputs, outputs, weight_dtype):
    """A tile height, a thread's share or a panel count that changes the arithmetic of a row: every count of
    rows from 1 to 70, and some beyond a row block, gives the bits of the whole product."""
    packed = ops.pack_linear(torch.randn(outputs, inputs).to(weight_dtype))
    x = torch.randn(700, inputs).to(weight_dtype)
    whole = ops.linear(x, packed, out_dtype=torch.float32)
    for count in [*range(1, 71), 96, 143, 144, 145, 290, 511]:
        first = (count * 7) % (700 - count)
        part = ops.linear(x[first : first + count], packed, out_dtype=torch.float32)
        assert torch.equal(part, whole[first : first + count]), count


@table("weight_dtype", FLOATS)
@table("t", [1, 5, 31, 200])
def test_threads_do_not_change_a_bit(t, weight_dtype, threads):
    """A cut between threads that changes a sum."""
    packed = ops.pack_linear(torch.randn(333, 700).to(weight_dtype))
    x = torch.randn(t, 700)
    y = ops.linear(x, packed)
    torch.set_num_threads(1)
    assert torch.equal(y, ops.linear(x, packed))


@table("weight_dtype", FLOATS)
def test_instruction_sets_of_one_arithmetic_agree(weight_dtype, every_isa):
    """A contracted or reordered operation on one of them: processors share snapshots whose numerics are the
    same."""
    packed = ops.pack_linear(torch.randn(75, 301).to(weight_dtype))
    x, bias = torch.randn(29, 301), torch.randn(75)
    x[3] *= 1e-38  # sums in the denormal range
    made = {}
    for isa in every_isa:
        set_isa(isa)
        y = ops.linear(x, packed, bias=bias)
        assert torch.equal(made.setdefault(ops.numerics(weight_dtype), y), y), isa


def test_each_element_is_one_chain_over_k(isa):
    """Two accumulators, or an order of k other than ascending: 2^24 + 1 - 2^24 is 0 in order and 1 out of
    order."""
    x = torch.tensor([[2.0**24, 1.0, -(2.0**24), 1.0]]).repeat(9, 200)
    packed = ops.pack_linear(torch.ones(40, 800))
    assert torch.equal(ops.linear(x, packed), torch.full((9, 40), 1.0))


def test_rounds_once_to_nearest_even(isa):
    """bfloat16 results truncated, or rounded before the bias is added."""
    packed = ops.pack_linear(torch.eye(3))
    x = torch.tensor([[1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-8 + 2.0**-20]])
    assert torch.equal(ops.linear(x, packed, out_dtype=torch.bfloat16), x.to(torch.bfloat16))
    bias = torch.tensor([2.0**-9, 0.0, 0.0])
    y = ops.linear(x, packed, out_dtype=torch.bfloat16, bias=bias)
    assert torch.equal(y, (x + bias).to(torch.bfloat16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_a_scale_multiplies_the_float32_sum(shape, weight_dtype, isa):
    """A scale that comes after the bias or after the rounding, one of another column, or one that is fused with the
    bias on one instruction set."""
    t, inputs, outputs = shape
    weight, x = torch.randn(outputs, inputs).to(weight_dtype), torch.randn(t, inputs)
    scale, bias = torch.randn(outputs), torch.randn(outputs)
    packed = ops.pack_linear(weight, scale)
    sums = ops.linear(x, ops.pack_linear(weight))
    for bias_or_none, expected in ((None, sums * scale), (bias, sums * scale + bias)):
        assert torch.equal(ops.linear(x, packed, bias=bias_or_none), expected)
        rounded = ops.linear(x, packed, out_dtype=torch.bfloat16, bias=bias_or_none)
        assert torch.equal(rounded, expected.bfloat16())
    assert torch.equal(packed.rows(torch.tensor([0])), weight[:1]), "an embedding that shares them has no scale"


def test_a_nan_stays_in_its_row():
    """Rows that leak into each other through padding."""
    x = torch.randn(20, 33)
    packed = ops.pack_linear(torch.randn(50, 33))
    clean = ops.linear(x, packed)
    x[11, 32] = torch.nan
    y = ops.linear(x, packed)
    assert y[11].isnan().all()
    keep = torch.arange(20) != 11
    assert torch.equal(y[keep], clean[keep])


@table("dtype", FLOATS)
@table("given", [*FLOATS, torch.float16, torch.float64])
def test_weights_of_another_dtype_are_packed_piece_by_piece(given, dtype, monkeypatch):
    """Fault: a piece is packed in another's place, is rounded in another way, or a ragged last one is left out."""
    monkeypatch.setattr(linear, "PIECE_ROWS", 32)
    for out, inputs in ((1, 1), (16, 256), (33, 300), (101, 515), (64, 700)):
        weight = strided(out, inputs, given)
        packed, whole = ops.pack_linear(weight, None, dtype), ops.pack_linear(weight.to(dtype))
        assert (packed.dtype, packed.out_features, packed.in_features) == (dtype, out, inputs)
        assert torch.equal(packed.data, whole.data)


@table("dtype", FLOATS)
def test_rows_come_back_from_packed_weights(dtype):
    """An embedding that shares the packed output projection reads another token's row."""
    weight = torch.randn(101, 515).to(dtype)
    indices = torch.tensor([100, 0, 15, 16, 17, 100])
    assert torch.equal(ops.pack_linear(weight).rows(indices), weight[indices])
    with pytest.raises(ValueError, match=r"\[0, 101\); its values span 0 to 101"):
        ops.pack_linear(weight).rows(torch.tensor([0, 101]))


def test_numerics_names_the_arithmetic(isa):
    """A store shared by processors whose bfloat16 arithmetic differs."""
    assert ops.numerics(torch.float32) == "f32-fma-1"
    product = {"avx512bf16": "dp", "amx": "amx"}.get(isa, "widen")
    assert ops.numerics(torch.bfloat16) == f"bf16-{product}-1"
