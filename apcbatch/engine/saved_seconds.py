"""Estimate the decode seconds that drafts saved, from the passes of one run.

A pass with drafts that brings `tokens` to `sequences` answers stands for tokens / sequences passes without drafts, each
of the median seconds that passes without drafts of as many sequences took: on a device those that ran ahead of the
host. Between two numbers of sequences that were measured the seconds are interpolated; beyond them nothing is assumed.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

LEAST_KNOWN = 0.9  # share of the seconds with drafts whose seconds without are known, for an estimate
SAMPLES = 63  # passes without drafts that are kept of one number of sequences, the last ones


class SavedSeconds:
    """Passes of an engine by their number of sequences, with and without drafts. Passes with prompts are left out."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[float]] = {}  # sequences -> seconds
        self._ahead: dict[int, deque[float]] = {}
        self._drafted: dict[int, list[float]] = {}  # sequences -> [tokens, seconds]

    def add_plain(self, sequences: int, seconds: float, is_ahead: bool = False) -> None:
        """Add a pass without drafts. is_ahead: it was begun before the one before it was read, as all are without
        drafts on a device."""
        plain = self._ahead if is_ahead else self._waiting
        plain.setdefault(sequences, deque(maxlen=SAMPLES)).append(seconds)

    def add_drafted(self, sequences: int, tokens: int, seconds: float) -> None:
        """Add a pass with drafts. tokens: new tokens of all its answers."""
        one = self._drafted.setdefault(sequences, [0.0, 0.0])
        one[0] += tokens
        one[1] += seconds

    @property
    def estimate(self) -> float | None:
        """Seconds saved, below 0 if drafts cost more than they brought. None without drafts, and if more than a tenth
        of the drafted passes' seconds has nothing to be compared with."""
        plain = self._ahead or self._waiting
        if not plain or not self._drafted:
            return None
        counts = sorted(plain)
        medians = [median(plain[count]) for count in counts]
        saved = known = 0.0
        for sequences, (tokens, seconds) in self._drafted.items():
            if counts[0] <= sequences <= counts[-1]:
                saved += tokens / sequences * float(np.interp(sequences, counts, medians)) - seconds
                known += seconds
        return saved if known >= LEAST_KNOWN * sum(seconds for _, seconds in self._drafted.values()) else None
