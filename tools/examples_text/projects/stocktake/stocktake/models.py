"""Items and movements."""

from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True)
class Item:
    """A thing that is kept in stock."""

    sku: str
    name: str
    reorder_at: int
    reorder_quantity: int


@dataclass(frozen=True)
class Movement:
    """Pieces that came in (positive) or went out (negative) on a day."""

    day: date
    sku: str
    quantity: int
    note: str = ""
