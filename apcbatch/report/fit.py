"""A document that fits its page: texts are cut until the page is small enough.

Must not know: what is shown where. Invariant: numbers and rows are never left out; what was cut says to how many
characters (`answer_characters`).
"""

from __future__ import annotations

import zlib
from typing import Any

import orjson

from apcbatch.report.texts import MOST_CHARACTERS, cut_columns

PAGE_BYTES = 2_000_000
REQUESTS_OF_A_PAGE = 50_000  # more of them may take more room
FRAME_BYTES = 120_000  # of the page without a document
LENGTHS = (8_000, 4_000, 2_000, 1_000, 600, 400, 250, 160, 100, 60, 40, 24, 16, 8, 4, 0)


def fit(document: dict[str, Any], page_bytes: int = PAGE_BYTES) -> dict[str, Any]:
    """The document with texts so long that its page has at most page_bytes, for each 50,000 requests."""
    requests = max(len(run["requests"]["id"]) for run in document["runs"])
    room = (page_bytes - FRAME_BYTES) * max(1, -(-requests // REQUESTS_OF_A_PAGE)) * 3 // 4  # in base64, 3 bytes are 4
    if packed_bytes(document) <= room:
        return document
    longest = max(map(_longest, document["runs"]))
    lengths = [length for length in LENGTHS if length < min(longest, MOST_CHARACTERS)] or [0]
    first, last = 0, len(lengths) - 1
    while first < last:  # the longest of them that fits; the last one if none does
        middle = (first + last) // 2
        if packed_bytes(_cut(document, lengths[middle])) <= room:
            last = middle
        else:
            first = middle + 1
    return _cut(document, lengths[first])


def packed_bytes(document: dict[str, Any]) -> int:
    """The bytes of the document's JSON, compressed as in the page."""
    return len(zlib.compress(orjson.dumps(document), 9, wbits=31))


def _cut(document: dict[str, Any], limit: int) -> dict[str, Any]:
    runs = [run | {"requests": cut_columns(run["requests"], limit)} for run in document["runs"]]
    return document | {"runs": runs}


def _longest(run: dict[str, Any]) -> int:
    """The characters of the longest text of a run."""
    columns = run["requests"]
    texts = (*columns["answer"], *columns["errors"], *(columns["prompt_text"] or ()))
    calls = (len(one["arguments"]) + len(one["name"]) for given in columns["calls"] for one in given or ())
    return max((*(len(text) for text in texts if text is not None), *calls), default=0)
