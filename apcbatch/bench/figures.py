"""A measured figure, the sizes of what is measured, and the two ways of timing.

Must not know: what is measured. Every figure is a median; the two sides of a ratio alternate in one run, and the
ratio is the median of the ratios.
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
    """How much is measured; a test measures less.

    prefill_tokens: lengths of single prompts. decode_running: sequences that decode together. new_tokens: of each.
    kernel_tokens: rows of a kernel's prefill figure. product_rows: rows of the products. long_tokens: the prompt of
    the ratios and of the breakdown. suffixes x suffix_tokens behind prefix_tokens restored ones: packed short ones.
    snapshot_every: the grid of the snapshots. restored_tokens: of the restores. repeats: of each figure; those that
    take longer than budget_s in all are repeated less, three times at least.
    """

    prefill_tokens: tuple[int, ...] = (128, 512, 2048, 8192)
    decode_running: tuple[int, ...] = (1, 8, 16, 32, 128)
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
    """One number. group: the heading it belongs to. details: what else the document says of it."""

    group: str
    name: str
    value: float
    unit: str
    details: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The figure as it stands in the document."""
        return {
            "group": self.group,
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            **self.details,
        }


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def median_s(run: Callable[[], object], sizes: Sizes) -> float:
    """Median seconds of a call, after one that is not counted unless it shows that the budget is short."""
    first = timed(run)
    few = first * (sizes.repeats + 1) > sizes.budget_s
    times = [first] if few else []
    repeats = min(3, sizes.repeats) if few else sizes.repeats
    while len(times) < repeats:
        times.append(timed(run))
    return statistics.median(times)


def median_ratio(one: Callable[[], float], other: Callable[[], float], repeats: int) -> float:
    """Median of one() / other(), seconds each, measured in turns; both have run before."""
    ratios = []
    for number in range(repeats):
        if number % 2:
            below, above = other(), one()
        else:
            above, below = one(), other()
        ratios.append(above / below)
    return statistics.median(ratios)
