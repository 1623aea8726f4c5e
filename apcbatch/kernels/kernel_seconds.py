"""Measure the time per kind of kernel inside calls that run several kernels. Used only by benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from apcbatch import _C

WAITING = "waiting for threads"  # mean time that a thread idles at a barrier; already contained in the other parts
PARTS = (  # csrc/parts.h, Part
    "matrix products",
    "convolution",
    "scan",
    "norms",
    "gated product",
    "experts",
    "attention",
    "embedding",
    "sampling",
    WAITING,
)


@contextmanager
def recorded_parts() -> Iterator[dict[str, float]]:
    """Record the time of this thread's fused calls inside the `with` block. Yields a mapping from part to seconds,
    filled when the block ends. `experts`: time of a mixture except its matrix products."""
    seconds: dict[str, float] = {}
    _C.record_parts(True)
    try:
        yield seconds
    finally:
        _C.record_parts(False)
        seconds.update(zip(PARTS, _C.part_seconds(), strict=True))
