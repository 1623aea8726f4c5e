"""The timeline of a run: what its passes did, in a bounded number of rows.

When the rows are full, neighbours are put together in pairs, and from then on each new row stands for twice as many
passes. Must not know: the engine, files. Invariant: sums over the rows are sums over all passes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from apcbatch.engine.observer import StepFacts
from apcbatch.job.segment import MOST_PASSES, Passes

_SECONDS = ("begin_s", "seconds", "prefill_s", "decode_s", "store_s")
_DECIMALS = 6


@dataclass(slots=True)
class _Row:
    """The fields of Passes, of one row."""

    begin_s: float
    seconds: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    store_s: float = 0.0
    passes: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    running: int = 0
    waiting: int = 0
    pool_bytes: int = 0
    store_bytes: int = 0
    failures: int = 0

    def add(self, facts: StepFacts) -> None:
        """Count a pass."""
        self.seconds += facts.seconds
        self.prefill_s += facts.prefill_s
        self.decode_s += facts.decode_s
        self.store_s += facts.store_s
        self.passes += 1
        self.prefill_tokens += facts.prefill_tokens
        self.decode_tokens += facts.decode_tokens
        self.running = max(self.running, facts.running)
        self.waiting = max(self.waiting, facts.waiting)
        self.pool_bytes, self.store_bytes = facts.pool_bytes, facts.store_bytes

    def merge(self, later: _Row) -> None:
        """Stand for the passes of the next row too."""
        self.seconds += later.seconds
        self.prefill_s += later.prefill_s
        self.decode_s += later.decode_s
        self.store_s += later.store_s
        self.passes += later.passes
        self.prefill_tokens += later.prefill_tokens
        self.decode_tokens += later.decode_tokens
        self.running = max(self.running, later.running)
        self.waiting = max(self.waiting, later.waiting)
        self.pool_bytes, self.store_bytes = later.pool_bytes, later.store_bytes
        self.failures += later.failures


class Timeline:
    """The passes of one run. most_rows: an even number."""

    def __init__(self, most_rows: int = MOST_PASSES) -> None:
        self._rows: list[_Row] = []
        self._most_rows, self._passes_per_row = most_rows, 1
        self._failures = 0  # before the first pass

    def add(self, facts: StepFacts, end_s: float) -> None:
        """Count a step that ended so many seconds after the segment's begin. One without a pass is idle time."""
        if not facts.prefill_tokens + facts.decode_tokens:
            return
        if not self._rows or self._rows[-1].passes >= self._passes_per_row:
            if len(self._rows) == self._most_rows:
                self._halve()
            self._rows.append(_Row(max(0.0, end_s - facts.seconds), failures=self._failures))
            self._failures = 0
        self._rows[-1].add(facts)

    def add_failure(self) -> None:
        """Count an error record, in the last pass."""
        if self._rows:
            self._rows[-1].failures += 1
        else:
            self._failures += 1

    def passes(self) -> Passes:
        """The rows; failures before any pass are a row without a pass at the begin."""
        rows = self._rows or [_Row(0.0, failures=self._failures)] * bool(self._failures)
        columns: dict[str, Any] = {field.name: [getattr(row, field.name) for row in rows] for field in fields(Passes)}
        for name, column in columns.items():
            if name in _SECONDS:
                columns[name] = [round(seconds, _DECIMALS) for seconds in column]
        return Passes(**columns)

    def _halve(self) -> None:
        for earlier, later in zip(self._rows[::2], self._rows[1::2], strict=True):
            earlier.merge(later)
        del self._rows[1::2]
        self._passes_per_row *= 2
