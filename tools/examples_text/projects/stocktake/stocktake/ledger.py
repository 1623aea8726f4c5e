"""Reading movements, and adding them up."""

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import date

from stocktake.models import Item, Movement


class LedgerError(ValueError):
    """A file that cannot be understood; the message names the line."""


def read_items(lines: Iterable[str]) -> dict[str, Item]:
    """Items by their number."""
    items = {}
    for row in csv.DictReader(lines):
        item = Item(
            sku=row["sku"].strip(),
            name=row["name"].strip(),
            reorder_at=int(row["reorder_at"]),
            reorder_quantity=int(row["reorder_quantity"]),
        )
        items[item.sku] = item
    return items


def read_movements(lines: Iterable[str]) -> Iterator[Movement]:
    """Movements in the order of the file."""
    reader = csv.DictReader(lines)
    for row in reader:
        try:
            yield Movement(
                day=date.fromisoformat(row["day"]),
                sku=row["sku"].strip(),
                quantity=int(row["quantity"]),
                note=row.get("note") or "",
            )
        except ValueError as error:
            raise LedgerError(f"line {reader.line_num}: {error}") from error


def balance(movements: Iterable[Movement], until: date | None = None) -> dict[str, int]:
    """Pieces left for each number, counting movements up to and including a day."""
    left: dict[str, int] = defaultdict(int)
    for movement in movements:
        if until is not None and movement.day > until:
            continue
        left[movement.sku] += movement.quantity
    return dict(left)
