"""The map."""

from collections.abc import Iterator
from dataclasses import dataclass

Cell = tuple[int, int]

COSTS = {".": 1, "S": 1, "G": 1, "~": 5}
STRAIGHT = ((0, 1), (1, 0), (0, -1), (-1, 0))
DIAGONAL = ((1, 1), (1, -1), (-1, 1), (-1, -1))


@dataclass(frozen=True)
class Grid:
    """Rows of characters; a cell is (row, column)."""

    rows: tuple[str, ...]
    diagonal: bool = False

    @classmethod
    def parse(cls, text: str, diagonal: bool = False) -> "Grid":
        """A map from text; empty lines around it are ignored."""
        rows = tuple(line.strip() for line in text.strip().splitlines())
        return cls(rows, diagonal)

    def find(self, mark: str) -> Cell:
        """The cell with this character."""
        for row, line in enumerate(self.rows):
            if mark in line:
                return row, line.index(mark)
        raise ValueError(f"there is no {mark!r} on the map")

    def is_open(self, cell: Cell) -> bool:
        """Whether one can stand there."""
        row, column = cell
        if row < 0 or column < 0 or row >= len(self.rows) or column >= len(self.rows[0]):
            return False
        return self.rows[row][column] in COSTS

    def cost(self, cell: Cell) -> int:
        """What it costs to enter a cell."""
        return COSTS[self.rows[cell[0]][cell[1]]]

    def neighbours(self, cell: Cell) -> Iterator[Cell]:
        """Open cells that are one step away."""
        for down, right in STRAIGHT + (DIAGONAL if self.diagonal else ()):
            other = (cell[0] + down, cell[1] + right)
            if self.is_open(other):
                yield other
