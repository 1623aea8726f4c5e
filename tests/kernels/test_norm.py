"""RMS norm, the residual addition before it, and the SwiGLU product."""

from __future__ import annotations

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.processor import set_isa
from tests.effort import table
from tests.kernels.recurrent import strided

ops = CpuBackend()

pytestmark = pytest.mark.pairwise

FLOATS = [torch.float32, torch.bfloat16]
WIDTHS = [1, 5, 8, 16, 31, 33, 77, 768]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def close(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within the rounding of y's dtype."""
    return torch.allclose(y.double(), expected.double(), rtol=TOLERANCE[y.dtype], atol=TOLERANCE[y.dtype])


@table("h", WIDTHS)
@table("x_dtype", FLOATS)
def test_rms_norm_matches_float64(h, x_dtype, isa):
    """A tail that is summed twice, or not, or together with what lies beside the row."""
    x, weight = strided(7, h, x_dtype), torch.randn(h)
    for out_dtype in FLOATS:
        for weight_or_none in (weight, None):
            y = ops.rms_norm(x, weight_or_none, 1e-5, out_dtype)
            assert y.dtype == out_dtype
            assert close(y, reference.rms_norm(x.double(), weight_or_none, 1e-5, torch.float64))


@table("h", WIDTHS)
@table("delta_dtype", FLOATS)
def test_add_rms_norm_is_the_sum_then_the_norm(h, delta_dtype, isa):
    """A residual that is not written, written beside its row, or rounded on the way."""
    wide = torch.full((7, h + 5), 9.0)
    residual = wide[:, 3 : 3 + h]
    residual.copy_(torch.randn(7, h))
    delta, weight = strided(7, h, delta_dtype), torch.randn(h)
    expected = residual + delta.float()
    y = ops.add_rms_norm_(residual, delta, weight, 1e-6, torch.float32)
    assert torch.equal(residual, expected)
    assert torch.equal(y, ops.rms_norm(expected, weight, 1e-6, torch.float32))
    assert bool((wide[:, :3] == 9.0).all()) and bool((wide[:, 3 + h :] == 9.0).all())


@table("f", WIDTHS)
@table("dtype", FLOATS)
def test_silu_mul_matches_float64(f, dtype, isa):
    """A tail with another exponential than the vector body, overflow for large negative gates."""
    gate, up = strided(7, f, dtype), strided(7, f, dtype)
    gate[0, 0], gate[1, 0], gate[2, 0] = -200.0, 200.0, 0.0
    y = ops.silu_mul(gate, up)
    assert y.dtype == dtype
    assert close(y, reference.silu_mul(gate.double(), up.double()))


@table("dtype", FLOATS)
def test_rows_and_threads_and_instruction_sets_give_the_same_bits(dtype, every_isa, threads):
    """A row whose bits depend on its place, on the threads or on the processor."""
    x, up, weight = torch.randn(301, 101).to(dtype), torch.randn(301, 101).to(dtype), torch.randn(101)
    made = []
    for isa in every_isa[::-1]:  # "plain" last
        set_isa(isa)
        made.append((ops.rms_norm(x, weight, 1e-5, dtype), ops.silu_mul(x, up)))
    normed, product = made[0]
    assert all(torch.equal(other, normed) and torch.equal(gated, product) for other, gated in made)
    for row in (0, 1, 150, 300):
        one = slice(row, row + 1)
        assert torch.equal(ops.rms_norm(x[one], weight, 1e-5, dtype), normed[one])
        assert torch.equal(ops.silu_mul(x[one], up[one]), product[one])
    # The same values at another place of a row meet other lanes, but element by element the same function.
    assert torch.equal(ops.silu_mul(x[:, 3:], up[:, 3:]), product[:, 3:])
