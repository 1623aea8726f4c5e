"""Fits the polynomials of csrc/vmath.h and csrc/cuda/vector_math.cuh and prints their coefficients:
python tools/fit_polynomials.py

Each is a minimax fit by Lawson's iteration (weighted least squares whose weights follow the error) on Chebyshev nodes
in float64. Some coefficients are fixed at their exact values; the others are rounded to float32 one by one, lowest
power first, and the rest are fitted again after each rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Function = Callable[[Array], Array]
ITERATIONS, NODES = 3000, 4001


def nodes(low: float, high: float) -> Array:
    """Chebyshev nodes of [low, high], without 0."""
    x: Array = np.cos(np.linspace(0, np.pi, NODES)) * (high - low) / 2 + (high + low) / 2
    return x[x != 0]


def lawson(columns: Array, target: Array) -> Array:
    """Coefficients c that make the largest |columns c - target| small."""
    scale = np.abs(columns).max(0)
    columns = columns / scale
    weights = np.full(len(target), 1 / len(target))
    best, smallest = np.zeros(columns.shape[1]), np.inf
    for _ in range(ITERATIONS):
        root = np.sqrt(weights)
        c = np.linalg.lstsq(columns * root[:, None], target * root, rcond=None)[0]
        error = np.abs(columns @ c - target)
        if error.max() < smallest:
            best, smallest = c, error.max()
        weights = weights * error
        weights /= weights.sum()
    return best / scale


def fit(
    name: str, f: Function, low: float, high: float, fixed: dict[int, float], degree: int, weight: Function
) -> None:
    """Print the coefficients of f on [low, high] and the largest weighted error."""
    x = nodes(low, high)
    coefficients = dict(fixed)
    for power in range(max(fixed) + 1, degree + 1):
        known = sum(c * x**p for p, c in coefficients.items())
        columns = np.stack([x**p * weight(x) for p in range(power, degree + 1)], 1)
        coefficients[power] = float(np.float32(lawson(columns, (f(x) - known) * weight(x))[0]))
    x = np.linspace(low, high, 200_001)
    x = x[x != 0]
    error = np.abs((f(x) - sum(c * x**p for p, c in coefficients.items())) * weight(x)).max()
    print(f"{name}: largest weighted error {error:.4g} (2^{np.log2(error):.2f})")
    for power, c in sorted(coefficients.items()):
        print(f"  x^{power}: {c.hex()}")


def main() -> None:
    half = np.log(2) / 2 * 1.0001
    fit("2^x, in units of the last place", np.exp2, -0.5, 0.5, {0: 1.0}, 5, lambda x: np.where(x < 0, 2.0**24, 2.0**23))
    fit("e^x, relative", np.exp, -half, half, {0: 1.0, 1: 1.0}, 6, lambda x: np.exp(-x))
    for degree in (8, 10):
        fit(
            f"log(1 + x), relative, degree {degree}",
            np.log1p,
            1e-9,
            1.0,
            {0: 0.0, 1: 1.0},
            degree,
            lambda x: 1 / np.log1p(x),
        )


if __name__ == "__main__":
    main()
