"""The elementwise functions under the recurrent ops: their error bounds and their edges."""

from __future__ import annotations

import random

import numpy as np
import torch

from apcbatch import _C
from tests.effort import table

EXP, EXP2, EXP2_BOUNDED, LOG1P_UNIT, SOFTPLUS, SILU, SIGMOID = range(7)  # csrc/scan.h, Elementwise
INF, NAN = float("inf"), float("nan")


def apply(function: int, values: np.ndarray) -> np.ndarray:
    """The function of float32 values."""
    source = np.ascontiguousarray(values, dtype=np.float32)
    result = np.full_like(source, NAN)
    _C.elementwise(function, source.ctypes.data, result.ctypes.data, source.size)
    return result


def spread(low: float, high: float, count: int = 400_001) -> np.ndarray:
    """float32 values all over [low, high]: uniform, and of every magnitude around 0."""
    generator = np.random.default_rng(random.getrandbits(31))
    uniform = generator.uniform(low, high, count)
    small = generator.uniform(low, high, count // 4) * np.exp2(-generator.uniform(0, 130, count // 4))
    return np.clip(np.concatenate([uniform, small, [low, high]]), low, high).astype(np.float32)


@table("function, low, high, exact, bound", [
    (EXP, -103.9, 88.72, np.exp, 2.0), (EXP2, -149.9, 127.99, np.exp2, 2.0), (EXP2_BOUNDED, -125, 125, np.exp2, 2.0),
    (LOG1P_UNIT, 0, 1, np.log1p, 2.0), (SOFTPLUS, -87, 200, lambda x: np.logaddexp(0, x), 2.5),
    (SILU, -88, 200, lambda x: x / (1 + np.exp(-x)), 3.2), (SIGMOID, -87, 200, lambda x: 1 / (1 + np.exp(-x)), 3.2),
])  # fmt: skip
def test_error_bound(isa, function, low, high, exact, bound):
    """A mistyped coefficient, a wrong reduction, a lost denormal: an error above what vmath.h states."""
    values = spread(low, high)
    if isa == "plain":
        values = values[::10]
    expected = exact(values.astype(np.float64))
    exponent = np.maximum(np.frexp(expected)[1], -125)  # denormals are spaced like the smallest normal numbers
    ulps = np.abs(apply(function, values).astype(np.float64) - expected) / np.ldexp(1.0, exponent - 24)
    assert float(ulps.max()) <= bound


@table("function, values, expected", [
    (EXP, [0.0, -0.0, 88.73, 89.5, 1e38, INF, -103.98, -1e38, -INF], [1, 1, INF, INF, INF, INF, 0, 0, 0]),
    (EXP2, [0, 1, -126, -149, 128, 1e38, INF, -151, -1e38, -INF],
     [1, 2, 2.0**-126, 2.0**-149, INF, INF, INF, 0, 0, 0]),
    (EXP2_BOUNDED, [0, 1, -125, 125], [1, 2, 2.0**-125, 2.0**125]),
    (SOFTPLUS, [20.5, 1e30, INF], [20.5, 1e30, INF]), (SILU, [0, 100, 1e30, INF], [0, 100, 1e30, INF]),
    (SIGMOID, [0, 100, INF, -200, -INF], [0.5, 1, 1, 0, 0]),
])  # fmt: skip
def test_exact_values(isa, function, values, expected):
    """An overflow that is not infinity, an underflow that is not zero, a power of two that is not exact."""
    assert apply(function, np.array(values)).tolist() == np.array(expected, np.float32).tolist()


def test_far_below_zero(isa):
    """A step or a gate far below zero that becomes negative, large or NaN."""
    values = np.array([-87.5, -90, -200, -1e30, -INF])
    steps, gates = apply(SOFTPLUS, values), apply(SILU, values)
    assert (steps > 0).all() and (steps < 2e-38).all()
    assert (gates <= 0).all() and (gates > -1e-36).all()


@table("function", [EXP, EXP2, SOFTPLUS, SILU, SIGMOID])
def test_nan_stays_nan(isa, function):
    """A NaN, quiet or signalling, of either sign, that turns into a number."""
    bits = np.array([0x7FC00000, 0x7FC00001, 0x7F800001, 0xFFC00000, 0xFFFFFFFF, 0x7FD55555], np.uint32)
    assert np.isnan(apply(function, bits.view(np.float32))).all()


def test_bounded_power_is_the_power():
    """A tile that takes the shorter way and then differs from one that does not."""
    values = spread(-125, 125)
    assert apply(EXP2_BOUNDED, values).tobytes() == apply(EXP2, values).tobytes()


def test_softplus_is_torchs():
    """A softplus that means something else than torch's: log1p(exp(x)), and x itself above 20."""
    values = spread(-30, 60)
    expected = torch.nn.functional.softplus(torch.from_numpy(values).double())
    actual = torch.from_numpy(apply(SOFTPLUS, values)).double()
    torch.testing.assert_close(actual, expected, rtol=4e-7, atol=0)
    above = values[values > 20]
    assert apply(SOFTPLUS, above).tobytes() == above.tobytes()
