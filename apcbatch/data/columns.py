"""Columns of an input that take no part in the answers: each is named once in a warning.

Must not know: files, formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from apcbatch.data.checks import shown

MOST_NAMES = 32


class UnusedColumns:
    """Warns of each new column, up to MOST_NAMES of them; then once that there are more."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._named: set[str] = set()
        self._full = False

    def note(self, columns: Sequence[str], line: int) -> None:
        """Take the columns of one line, counted from 1."""
        new = [name for name in columns if name not in self._named]
        if not new or self._full:
            return
        told = new[: MOST_NAMES - len(self._named)]
        self._named.update(told)
        self._full = len(told) < len(new)
        if told:
            names = ", ".join(map(shown, told))
            self._warn(f"these columns take no part in the answers: {names} (first on line {line})")
        if self._full:
            self._warn(f"line {line} has further columns that take no part in the answers; they are not named")
