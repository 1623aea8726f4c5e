"""Shorten a document until its page has at most PAGE_BYTES per 50,000 requests.

First texts are cut, all to one length. If the page is too large without any text, times are rounded to two significant
digits and long ids are cut as far as they stay different. Invariants: no row and no count is left out or changed; the
page says what was shortened (`answer_characters`, and a note).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any

from apcbatch.report.texts import MOST_CHARACTERS, cut_columns, shortened

PAGE_BYTES = 2_000_000
REQUESTS_OF_A_PAGE = 50_000  # a page of more requests may be larger
FRAME_BYTES = 110_000  # size of the page without a document
LENGTHS = (0, 4, 8, 16, 24, 40, 60, 100, 160, 250, 400, 600, 1_000, 2_000, 4_000, 8_000, MOST_CHARACTERS)
ID_LENGTHS = (24, 16, 12)
PIECE_ROWS = 2_000
TEXTS = ("answer", "calls", "errors", "prompt_text")


def fit(document: dict[str, Any], page_bytes: int = PAGE_BYTES) -> dict[str, Any]:
    """Shorten the document so that its page has at most page_bytes per 50,000 requests. If the page is still larger
    without any text, with rounded times and with the shortest ids that stay different, it stays so."""
    requests = sum(len(run["requests"]["id"]) for run in document["runs"])
    pages = max(1, -(-requests // REQUESTS_OF_A_PAGE))
    room = (page_bytes - FRAME_BYTES) * pages * 3 // 4  # base64 turns 3 bytes into 4
    tables = [{k: v for k, v in run["requests"].items() if k not in TEXTS} for run in document["runs"]]
    left = room - (_packed_bytes([_with_tables(document, tables)], room) or room)
    if left <= 0:
        return _shorten_all(document, room)
    if _texts_fit(document, left):
        return document
    first, last = 0, len(LENGTHS) - 1
    while first < last:  # the greatest length that fits
        middle = (first + last + 1) // 2
        if _texts_fit(_cut(document, LENGTHS[middle]), left):
            first = middle
        else:
            last = middle - 1
    return _cut(document, LENGTHS[first])


def _texts_fit(document: dict[str, Any], room: int) -> bool:
    columns = (run["requests"][name] or [] for run in document["runs"] for name in TEXTS)
    pieces = (column[at : at + PIECE_ROWS] for column in columns for at in range(0, len(column), PIECE_ROWS))
    return _packed_bytes(pieces, room) is not None


def _shorten_all(document: dict[str, Any], room: int) -> dict[str, Any]:
    """Drop all texts, round times, and cut ids to the greatest length that fits, unless two ids would become equal."""
    short = _cut(document, 0)
    tables = [
        run["requests"] | {name: list(map(_two_digits, run["requests"][name])) for name in ("prefill_ms", "decode_ms")}
        for run in short["runs"]
    ]
    short = _noted(_with_tables(short, tables), "times of requests are rounded to two digits, for the page to be small")
    if _packed_bytes([short], room) is not None:
        return short
    for length in ID_LENGTHS:
        ids = [[shortened(name, length) for name in run["requests"]["id"]] for run in short["runs"]]
        if any(len(set(new)) < len(set(run["requests"]["id"])) for new, run in zip(ids, short["runs"], strict=True)):
            break
        tables = [run["requests"] | {"id": new} for run, new in zip(short["runs"], ids, strict=True)]
        cut = _noted(_with_tables(short, tables), f"ids are cut to {length} characters, for the page to be small")
        if _packed_bytes([cut], room) is not None or length == ID_LENGTHS[-1]:
            return cut
    return short


def _packed_bytes(parts: Iterable[Any], room: int) -> int | None:
    """Return the size of the parts' JSON, compressed as in the page; None as soon as it exceeds `room`."""
    packer = zlib.compressobj(zlib.Z_BEST_COMPRESSION)
    size: int = 0
    for part in parts:
        data = json.dumps(part, separators=(",", ":")).encode()
        for at in range(0, len(data), 1 << 20):
            size += len(packer.compress(data[at : at + (1 << 20)]))
            if size > room:
                return None
    size += len(packer.flush())
    return None if size > room else size


def _cut(document: dict[str, Any], limit: int) -> dict[str, Any]:
    return _with_tables(document, [cut_columns(run["requests"], limit) for run in document["runs"]])


def _with_tables(document: dict[str, Any], tables: list[dict[str, Any]]) -> dict[str, Any]:
    runs = [run | {"requests": table} for run, table in zip(document["runs"], tables, strict=True)]
    return document | {"runs": runs}


def _noted(document: dict[str, Any], sentence: str) -> dict[str, Any]:
    return document | {"runs": [run | {"notes": [*run["notes"], sentence]} for run in document["runs"]]}


def _two_digits(value: int) -> int:
    unit = int("1" + "0" * max(0, len(str(value)) - 2))
    return (value + unit // 2) // unit * unit
