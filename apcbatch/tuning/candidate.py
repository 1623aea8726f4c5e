"""A candidate of `tune-block-size`: one block size, what it reuses and how long that takes.

Must not know: how the numbers were found.
"""

from __future__ import annotations

from dataclasses import dataclass

from apcbatch.plan.forecast import PolicyForecast


@dataclass(frozen=True)
class Verified:
    """A real run: seconds of prefill, seconds of everything after loading, restored prompt tokens."""

    prefill_s: float
    total_s: float
    cached_tokens: int


@dataclass(frozen=True)
class Candidate:
    """One block size: what it reuses, and the seconds that this is predicted to take."""

    block_size: int
    table: PolicyForecast
    prefill_s: float
    restore_s: float
    write_s: float
    verified: Verified | None = None

    @property
    def total_s(self) -> float:
        """Predicted seconds of prefill, restores and writes."""
        return self.prefill_s + self.restore_s + self.write_s

    @property
    def best_known_s(self) -> float:
        """Seconds of the whole run: measured if it was verified, else predicted."""
        return self.total_s if self.verified is None else self.verified.total_s
