"""Types of a measured figure and of the sizes of the measurements, and two ways of timing.

Every figure is a median, except that a whole run is measured once. The two sides of a ratio are measured alternately,
and the figure is the median of their ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REPEATS = 5


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    prefill_tokens: lengths of single prompts. decode_running: numbers of sequences that decode together. draft_running,
    draft_rows: numbers of sequences and of rows of the passes that verify drafts. new_tokens: tokens that each sequence
    generates. kernel_tokens: tokens in a call of a kernel, except in decode steps. product_rows: numbers of rows of the
    matrix products. long_tokens: length of the long prompts, for ratios and breakdowns by part. suffixes,
    suffix_tokens: number and length of short suffixes that are packed into one pass. prefix_tokens: length of the
    restored prefix before them. snapshot_every: tokens between two snapshots. restored_tokens: length of a restored
    prefix. repeats: measurements of each figure. budget_s: seconds for all repeats of a figure; a slower figure gets
    fewer repeats, but at least three.
    """

    prefill_tokens: tuple[int, ...] = (128, 512, 2048, 8192)
    decode_running: tuple[int, ...] = (1, 8, 16, 32, 128)
    draft_running: tuple[int, ...] = (1, 8, 32)
    draft_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    new_tokens: int = 16
    kernel_tokens: int = 2048
    product_rows: tuple[int, ...] = (1, 16, 32, 128, 512)
    long_tokens: int = 2048
    suffixes: int = 16
    suffix_tokens: int = 128
    prefix_tokens: int = 512
    snapshot_every: int = 64
    restored_tokens: int = 1024
    repeats: int = REPEATS
    budget_s: float = 8.0


@dataclass(frozen=True)
class Figure:
    """One measured number. group: its heading in the document. details: further keys of the figure in the document."""

    group: str
    name: str
    value: float
    unit: str
    details: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the figure as a JSON object of the document."""
        return {
            "group": self.group,
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            **self.details,
        }


def timed(run: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def median_s(run: Callable[[], object], sizes: Sizes) -> float:
    """Return the median seconds of a call. The first call is a warm-up, unless it shows that all repeats would exceed
    budget_s; then it counts, and there are at most three calls."""
    first = timed(run)
    few = first * (sizes.repeats + 1) > sizes.budget_s
    times = [first] if few else []
    repeats = min(3, sizes.repeats) if few else sizes.repeats
    while len(times) < repeats:
        times.append(timed(run))
    return statistics.median(times)


def median_ratio(one: Callable[[], float], other: Callable[[], float], repeats: int) -> float:
    """Return the median of one() / other(). Both return seconds and are called alternately; the caller has warmed them
    up."""
    ratios = []
    for number in range(repeats):
        if number % 2:
            below, above = other(), one()
        else:
            above, below = one(), other()
        ratios.append(above / below)
    return statistics.median(ratios)
