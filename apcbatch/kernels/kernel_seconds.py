"""Time per kind of kernel inside calls that run several of them. For benchmarks alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from apcbatch import _C

WAITING = "waiting for threads"  # mean time of a thread at barriers; contained in the other parts
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
    """Seconds by part of this thread's calls of fused sub-blocks inside the block; the mapping is filled at its end.
    `experts`: a mixture without its matrix products."""
    seconds: dict[str, float] = {}
    _C.record_parts(True)
    try:
        yield seconds
    finally:
        _C.record_parts(False)
        seconds.update(zip(PARTS, _C.part_seconds(), strict=True))
