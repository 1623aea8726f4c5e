"""Where the time goes inside the ops that run several kernels in one call. For benchmarks: nothing else reads it.

Must not know: models, what the times are for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from apcbatch import _C

WAITING = "waiting for threads"  # in all other parts
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
    """Seconds by part of the FusedMixer, FusedMlp and FusedMixture calls that this thread makes inside; the mapping
    is filled at the end. `experts` is what a mixture does besides its products."""
    seconds: dict[str, float] = {}
    _C.record_parts(True)
    try:
        yield seconds
    finally:
        _C.record_parts(False)
        seconds.update(zip(PARTS, _C.part_seconds(), strict=True))
