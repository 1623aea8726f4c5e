"""Read tables of comma- or tab-separated values.

Invariants: a table is recognised by the columns in its first line, never by the file name. One row is in memory at a
time, and its size is bounded.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from apcbatch.data.checks import invalid
from apcbatch.data.fields import BY_SHAPE
from apcbatch.data.input.layouts import LineOptions, has_layout
from apcbatch.data.input.lines import BOM, split_lines
from apcbatch.data.json_text import json_or_text
from apcbatch.errors import RequestError

ERRORS = (csv.Error,)
_PARSED = {"body", *(field.name for field in BY_SHAPE["messages"].values() if field.kind == "honoured")}


def header_of(line: bytes) -> tuple[str, list[str]] | None:
    """Parse the first line of a table as (separator, columns).

    Return None if it is empty, begins like JSON, or is not UTF-8 or CSV. A line with a tab is separated by tabs, any
    other line by commas: `a b` is one column."""
    try:
        text = line.removeprefix(BOM).decode().rstrip("\r\n")
    except ValueError:
        return None
    if not text or text.lstrip().startswith(("{", "[")):
        return None
    separator = "\t" if "\t" in text else ","
    try:
        [columns] = csv.reader([text], delimiter=separator)
    except (csv.Error, ValueError):
        return None
    return separator, columns


def separator_of(line: bytes, options: LineOptions) -> str | None:
    """Return the separator of a table, by its first line; None if no column is one of a known layout."""
    found = header_of(line)
    return found[0] if found is not None and has_layout(dict.fromkeys(found[1], ""), options) else None


def read_separated(chunks: Iterator[bytes], separator: str, limit: int) -> Iterator[dict[str, Any] | RequestError]:
    """Yield each row below the header as a record: without empty cells, and with settings parsed as JSON.

    Yield a RequestError for a row with another number of values than the header, or one that is not UTF-8. limit:
    maximum bytes of a row. Raises one of ERRORS for a longer row, and for one whose quotes do not close.
    """
    csv.field_size_limit(limit)
    taken = 0

    def lines() -> Iterator[str]:
        nonlocal taken
        for _, data in split_lines(chunks, limit, keep_blank=True):
            taken += data if isinstance(data, int) else len(data) + 1
            if isinstance(data, int) or taken > limit:
                raise csv.Error(f"a row holds more than {limit:,} bytes; is a quote left open?")
            yield data.decode("utf-8", "surrogateescape") + "\n"

    reader = csv.reader(lines(), delimiter=separator, strict=True)
    columns, taken = next(reader), 0
    for cells in reader:
        taken = 0
        if not cells:
            continue
        if len(cells) != len(columns):
            yield invalid(f"the row has {len(cells)} values; expected {len(columns)}, as the header has")
        elif not all(cell.isascii() or cell.isprintable() or _is_text(cell) for cell in cells):
            yield invalid("the row is not UTF-8")
        else:
            yield {
                name: json_or_text(cell) if name in _PARSED else cell
                for name, cell in zip(columns, cells, strict=True)
                if cell
            }


def _is_text(cell: str) -> bool:
    try:
        cell.encode()
    except UnicodeEncodeError:
        return False
    return True
