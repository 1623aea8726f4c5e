"""The reorder report."""

from stocktake.models import Item

COLUMNS = ("sku", "name", "left", "order")


def to_reorder(items: dict[str, Item], left: dict[str, int]) -> list[tuple[Item, int]]:
    """Items that have run low, with the pieces that are left, by name."""
    low = []
    for item in items.values():
        pieces = left.get(item.sku, 0)
        if pieces < item.reorder_at:
            low.append((item, pieces))
    return sorted(low, key=lambda pair: pair[0].name)


def as_rows(low: list[tuple[Item, int]]) -> list[tuple[str, str, str, str]]:
    """The rows of the report as text."""
    return [(item.sku, item.name, str(left), str(item.reorder_quantity)) for item, left in low]


def as_table(rows: list[tuple[str, str, str, str]]) -> str:
    """Rows under a header, in columns two spaces apart."""
    widths = [max(len(column), 8) for column in COLUMNS]
    lines = []
    for row in (COLUMNS, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
