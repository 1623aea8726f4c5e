"""The ops on heads around attention: RMS norm with rotary position embedding, and the output gate."""

from __future__ import annotations

import random
from decimal import Decimal, localcontext

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.layer import rotary_steps
from apcbatch.kernels.processor import set_isa
from tests.effort import table, tries
from tests.kernels.recurrent import poison, same_bits

ops = CpuBackend()

pytestmark = pytest.mark.pairwise

FLOATS = [torch.float32, torch.bfloat16]
FORMS = [(8, 8), (8, 4), (24, 6), (64, 16), (64, 62), (128, 128), (256, 64), (7, 2), (5, 0)]  # head_dim, rotary_dim
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
MOST = 100_000  # positions


def rows(t: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Random heads that are a slice of wider rows, which are NaN everywhere else."""
    wide = torch.full((t, heads + 2, head_dim), torch.nan, dtype=dtype)
    wide[:, 1:-1] = torch.randn(t, heads, head_dim)
    return wide[:, 1:-1]


def close(y: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(y.double(), expected, rtol=TOLERANCE[y.dtype], atol=TOLERANCE[y.dtype])


@pytest.mark.parametrize(("head_dim", "rotary_dim"), FORMS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_rope_matches_float64(head_dim, rotary_dim, dtype, has_norm, isa):
    """A tail of a half that is rotated twice or not, columns past rotary_dim that are, an angle of the wrong position,
    and the precision of float32 angles, which is 1e-2 at position 100,000."""
    steps, weight = rotary_steps(rotary_dim, 1e7), torch.randn(head_dim) if has_norm else None
    wide = weight.double() if has_norm else None
    for _ in range(tries(3)):
        t, heads = random.randint(1, 9), random.randint(1, 5)
        x, positions = rows(t, heads, head_dim, dtype), torch.randint(MOST + 1, (t,))
        positions[0] = random.choice([0, 1, MOST])
        poison(x.shape, dtype)
        y = ops.norm_rope(x, weight, 1e-6, steps, positions)
        assert y.dtype == dtype and y.is_contiguous()
        assert close(y, reference.norm_rope(x.double(), wide, 1e-6, steps, positions))
        assert close(y, reference.norm_rope(x, weight, 1e-6, steps, positions).double())


def test_angles_are_those_of_the_paper():
    """A step in the wrong unit, or of another pair: theta^(-2i / rotary_dim) to the last bit, and cos and sin rounded
    once, at every position."""
    for rotary_dim, theta in ((64, 1e7), (6, 10_000.0), (128, 1.0)):
        steps, pairs = rotary_steps(rotary_dim, theta), rotary_dim // 2
        frequencies = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / -rotary_dim)
        torch.testing.assert_close(steps.double() * (2 * torch.pi / 2**64), frequencies, rtol=1e-9, atol=1e-18)
        positions = torch.cat([torch.arange(300), torch.randint(MOST + 1, (700,))])
        # Heads whose norm is (1, .., 1, 0, ..): rotated, they are cos and sin.
        x = torch.zeros(len(positions), 1, rotary_dim)
        x[..., :pairs] = 1
        y = ops.norm_rope(x, torch.full((rotary_dim,), 0.5**0.5), 0.0, steps, positions)[:, 0]
        angles = positions.double().unsqueeze(1) * frequencies
        torch.testing.assert_close(y.double(), torch.cat([angles.cos(), angles.sin()], 1), rtol=2e-7, atol=1e-10)
        assert torch.equal(steps, rotary_steps(rotary_dim, theta))
    with localcontext() as context:
        context.prec = 80
        assert int(rotary_steps(64, 1e7)[0]) == round(
            Decimal(2**64) / 2 / Decimal("3.14159265358979323846264338327950")
        )


@table("dtype", FLOATS)
@table("weight", [torch.rand(72) + 0.5, None])
def test_rows_and_threads_and_instruction_sets_give_the_same_bits(dtype, weight, every_isa, threads):
    """A row whose bits depend on its place, on the threads or on the processor."""
    steps = rotary_steps(44, 1e6)
    x, positions, gate = rows(301, 4, 72, dtype), torch.randint(MOST, (301,)), torch.randn(301, 288).to(dtype)
    made = []
    for isa in every_isa[::-1]:  # "plain" last
        set_isa(isa)
        y = ops.norm_rope(x, weight, 1e-6, steps, positions)
        made.append((y, ops.sigmoid_mul(y.view(301, -1), gate)))
    turned, gated = made[0]
    assert all(same_bits(one, turned) and same_bits(other, gated) for one, other in made)
    for row in (0, 1, 150, 300):
        one = slice(row, row + 1)
        assert same_bits(ops.norm_rope(x[one], weight, 1e-6, steps, positions[one]), turned[one])
        assert same_bits(ops.norm_rope(x[one, 2:3], weight, 1e-6, steps, positions[one]), turned[one, 2:3])
        assert same_bits(ops.sigmoid_mul(turned[one].flatten(1), gate[one]), gated[one])
    assert same_bits(ops.sigmoid_mul(turned.view(301, -1)[:, 3:], gate[:, 3:]), gated[:, 3:])


@table("columns", [1, 5, 8, 16, 31, 33, 77, 768])
@table("dtype", FLOATS)
def test_sigmoid_mul_matches_float64(columns, dtype, isa):
    """A tail with another exponential than the vector body, overflow for large negative gates, a NaN that is lost."""
    x, gate = rows(7, 1, columns, dtype)[:, 0], rows(7, 1, columns, dtype)[:, 0] * 3
    gate[0, 0], gate[1, 0], gate[2, 0], gate[3, 0] = -200.0, 200.0, 0.0, torch.nan
    poison(x.shape, dtype)
    y = ops.sigmoid_mul(x, gate)
    expected = reference.sigmoid_mul(x.double(), gate.double())
    assert y.dtype == dtype and bool(y[3, 0].isnan()) and bool(expected[3, 0].isnan())
    y[3, 0], expected[3, 0] = 0, 0
    assert close(y, expected)


def test_nothing_beside_a_head_is_touched_or_read():
    """A NaN in one head that reaches its neighbours, or a token's position another token."""
    steps, weight, x = rotary_steps(6, 1e4), torch.ones(9), torch.randn(3, 3, 9)
    positions = torch.tensor([5, 6, 7])
    y = ops.norm_rope(x, weight, 1e-6, steps, positions)
    x[1, 1] = torch.nan
    hurt = ops.norm_rope(x, weight, 1e-6, steps, positions)
    assert bool(hurt[1, 1].isnan().all())
    hurt[1, 1] = y[1, 1]
    assert same_bits(hurt, y)


X, STEPS, ALL = torch.randn(2, 3, 8), rotary_steps(4, 1e4), torch.arange(2)


@table("call, sentence", [
    (lambda: ops.norm_rope(X[0], torch.ones(8), 1e-6, STEPS, ALL), r"x must be \(tokens, heads, head_dim\)"),
    (lambda: ops.norm_rope(X, torch.ones(7), 1e-6, STEPS, ALL), r"weight must be \(8,\)"),
    (lambda: ops.norm_rope(X[..., :3], torch.ones(3), 1e-6, STEPS, ALL), "at most half of the 3 columns"),
    (lambda: ops.norm_rope(X, torch.ones(8), 1e-6, STEPS, ALL[:1]), r"positions must be .* \(2,\)"),
    (lambda: ops.norm_rope(X, torch.ones(8), 1e-6, STEPS, ALL.int()), "positions must be .* torch.int64"),
    (lambda: ops.norm_rope(X, torch.ones(8), 1e-6, STEPS.double(), ALL), "steps must be .* torch.int64"),
    (lambda: ops.norm_rope(X.half(), torch.ones(8), 1e-6, STEPS, ALL), "x must be float32 or"),
    (lambda: ops.norm_rope(X.to("meta"), torch.ones(8), 1e-6, STEPS, ALL), "must be on the CPU"),
    (lambda: ops.sigmoid_mul(X, X), "x must have two dimensions"),
    (lambda: ops.sigmoid_mul(X[0], X[0, :, :5]), "gate must have the shape of x"),
    (lambda: ops.sigmoid_mul(X[0], X[0].bfloat16()), "must have one dtype"),
    (lambda: ops.sigmoid_mul(X[0].to("meta"), X[0]), "must be on the CPU"),
    (lambda: rotary_steps(5, 1e4), "rotary_dim must be even"),
    (lambda: rotary_steps(4, 0.5), "theta a finite number of at least 1"),
    (lambda: rotary_steps(4, float("inf")), "theta a finite number of at least 1"),
])  # fmt: skip
def test_unusable_arguments_are_sentences(call, sentence):
    """Wrong shapes and dtypes that would reach the kernel as addresses."""
    with pytest.raises(ValueError, match=sentence):
        call()
