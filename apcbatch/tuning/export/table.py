"""A table for a terminal of some width: columns that do not fit are left out, the least needed first.

Must not know: what the columns mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GAP = "  "


@dataclass(frozen=True)
class Column:
    """One column. need: 0 is always shown; of the others the highest goes first. align: as in format()."""

    head: str
    cells: int
    need: int = 0
    align: str = ">"


class Table:
    """The columns that fit. left_out: the heads of the others."""

    def __init__(self, columns: Sequence[Column], width: int | None) -> None:
        self._columns = list(columns)
        self.left_out: list[str] = []
        while width is not None and self._cells > width:
            least = max(self._columns, key=lambda column: column.need)
            if not least.need:
                break
            self._columns.remove(least)
            self.left_out.append(least.head)

    @property
    def _cells(self) -> int:
        return sum(column.cells for column in self._columns) + len(GAP) * (len(self._columns) - 1)

    def head(self) -> str:
        """The line of the heads."""
        return self.row({column.head: column.head for column in self._columns})

    def row(self, values: Mapping[str, str]) -> str:
        """One line, from a text for each head."""
        return GAP.join(f"{values[column.head]:{column.align}{column.cells}}" for column in self._columns)

    def note(self) -> list[str]:
        """A line that names what was left out; none if nothing was."""
        named = [head for head in self.left_out if head]
        return [f"left out at this width: {', '.join(named)}; --json has them"] if named else []
