"""Seconds of a pass by its number of rows, measured while running."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

SAMPLES = 7  # passes kept per row count
KNOWN = 3  # samples that suffice for an estimate
EXPIRES = 512  # passes
# Extra time of an unmeasured row, the smaller of both; low, so that larger passes are tried.
UNKNOWN_SLOPE = 0.02  # as a share of the pass's seconds
UNKNOWN_SHARE = 0.25  # as a share of the mean seconds of the pass's rows


class RowCosts:
    """Estimate of a pass's seconds from its number of rows.

    Each row count has the median of its last SAMPLES passes; neighbouring counts share one (`_rounded`). The medians
    are made non-decreasing by isotonic regression (pool-adjacent-violators: Barlow et al. 1972, Statistical Inference
    under Order Restrictions, section 1.2) and interpolated. A row count without a sample in EXPIRES passes is dropped,
    so that one which seemed too slow is tried again.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}  # rows -> seconds
        self._last: dict[int, int] = {}  # rows -> number of the pass that had them last, the oldest first
        self._num_passes = 0
        self._rows: list[int] = []  # fitted, like the next
        self._seconds: list[float] = []
        self._is_fitted = True

    def add(self, rows: int, seconds: float) -> None:
        """Add the sample of one pass."""
        rows = _rounded(rows)
        self._seen.setdefault(rows, deque(maxlen=SAMPLES)).append(seconds)
        self._last.pop(rows, None)
        self._last[rows] = self._num_passes
        self._is_fitted = False
        self.age()

    def age(self) -> None:
        """Count a pass, and drop the row counts that had no sample in the last EXPIRES passes."""
        self._num_passes += 1
        while self._last and (oldest := next(iter(self._last.items())))[1] < self._num_passes - EXPIRES:
            del self._seen[oldest[0]], self._last[oldest[0]]
            self._is_fitted = False

    def _fit(self) -> None:
        """Fit non-decreasing seconds: pool neighbouring row counts whose medians fall."""
        self._rows, self._is_fitted = sorted(self._seen), True
        pools: list[tuple[float, int, int]] = []  # mean of medians, samples, numbers of rows
        for rows in self._rows:
            samples = self._seen[rows]
            mean, weight, count = median(samples), len(samples), 1
            while pools and pools[-1][0] >= mean:
                other, its_weight, its_count = pools.pop()
                mean = (other * its_weight + mean * weight) / (its_weight + weight)
                weight, count = weight + its_weight, count + its_count
            pools.append((mean, weight, count))
        self._seconds = [mean for mean, _, count in pools for _ in range(count)]

    def __bool__(self) -> bool:
        return bool(self._seen)

    def knows(self, rows: int) -> bool:
        """Return whether a row count within a quarter of this one, or 1 away, has at least KNOWN samples."""
        near = (len(seen) for count, seen in self._seen.items() if abs(count - rows) <= max(1, rows // 4))
        return max(near, default=0) >= KNOWN

    def of(self, rows: int) -> float:
        """Return the estimated seconds of a pass.

        Between two measured row counts it is interpolated. Beyond the largest one, and below the smallest, it is
        extrapolated from that count's seconds by `_added`. Without samples a pass of no row takes 1 second."""
        if not self._is_fitted:  # not in `add`, as most passes without drafts need no estimate
            self._fit()
        known, seconds = self._rows, self._seconds
        if not known:
            return 1 + _added(rows, 0)
        rows = max(rows, 1)
        at = bisect_left(known, rows)
        if at == len(known):
            return seconds[-1] * (1 + _added(rows - known[-1], known[-1]))
        if at == 0:
            return seconds[0] / (1 + _added(known[0] - rows, known[0]))
        share = (rows - known[at - 1]) / (known[at] - known[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


def _added(rows: int, known: int) -> float:
    """Return the assumed extra time of further rows, as a share of the seconds of a pass with `known` rows."""
    return rows * min(UNKNOWN_SLOPE, UNKNOWN_SHARE / max(known, 1))


def _rounded(rows: int) -> int:
    """Round a row count up to a multiple of the largest power of two within an eighth of it; below 16, keep it."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step
