"""Record the passes of a run in a bounded number of rows.

When the rows are full, neighbours are merged in pairs, and each later row covers twice as many passes. Invariant: sums
over the rows are sums over all passes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from apcbatch.engine.observer import StepFacts
from apcbatch.job.tracing.segment import MAX_PASS_ROWS, PassColumns

Row = list[Any]  # a value for each field of PassColumns
_FIELDS = fields(PassColumns)
_PASSES, _FAILURES = ([field.name for field in _FIELDS].index(name) for name in ("passes", "failures"))
_DECIMALS = 6


def _first(earlier: float, later: float) -> float:
    return earlier


def _last(earlier: float, later: float) -> float:
    return later


# How to merge the values of two rows; fields that are not here are added.
_MERGED: dict[str, Callable[[Any, Any], Any]] = {
    "begin_s": _first,
    "running": max,
    "waiting": max,
    "pool_bytes": _last,
    "store_bytes": _last,
}
_MERGES = [_MERGED.get(field.name, operator.add) for field in _FIELDS]


class Timeline:
    """Passes of one run. max_rows: an even number."""

    def __init__(self, max_rows: int = MAX_PASS_ROWS) -> None:
        self._rows: list[Row] = []
        self._max_rows, self._passes_per_row = max_rows, 1
        self._failures = 0  # failures before the first pass

    def add(self, facts: StepFacts, end_s: float) -> None:
        """Add a step that ended `end_s` seconds after the segment's begin. A step without a pass is idle time, and
        skipped."""
        if not facts.prefill_tokens + facts.decode_tokens:
            return
        begin_s, failures, self._failures = max(0.0, end_s - facts.seconds), self._failures, 0
        row = [begin_s, facts.seconds, facts.prefill_s, facts.decode_s, facts.store_s, 1]
        row += [facts.prefill_tokens, facts.decode_tokens, facts.running, facts.waiting]
        row += [facts.pool_bytes, facts.store_bytes, failures]
        if self._rows and self._rows[-1][_PASSES] < self._passes_per_row:
            self._rows[-1] = _merged(self._rows[-1], row)
            return
        if len(self._rows) == self._max_rows:
            self._rows = [_merged(*pair) for pair in zip(self._rows[::2], self._rows[1::2], strict=True)]
            self._passes_per_row *= 2
        self._rows.append(row)

    def add_failure(self) -> None:
        """Count an error record in the latest row."""
        if self._rows:
            self._rows[-1][_FAILURES] += 1
        else:
            self._failures += 1

    def columns(self) -> PassColumns:
        """Return the rows as columns. If there are failures but no pass, one row with 0 passes at the begin counts
        them."""
        rows = self._rows or [[0.0] * _PASSES + [0] * (_FAILURES - _PASSES) + [self._failures]] * bool(self._failures)
        columns = [[row[place] for row in rows] for place in range(len(_FIELDS))]
        seconds = ([round(value, _DECIMALS) for value in column] for column in columns[:_PASSES])
        return PassColumns(*seconds, *columns[_PASSES:])


def _merged(earlier: Row, later: Row) -> Row:
    """Merge two successive rows into one."""
    return [merge(*pair) for merge, *pair in zip(_MERGES, earlier, later, strict=True)]
