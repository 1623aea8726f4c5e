"""What the table of requests must show, worked out in Python from the document: its order and its filter.

Written from the page's own help, and not from its scripts. Rows are numbers: the place of a request in OUT.
"""

from __future__ import annotations

import operator
import re
from typing import Any

NUMBERS = ("line", "turn", "prompt", "cached", "ideal", "computed", "out", "prefill_ms", "decode_ms")
TEXTS = ("id", "reason", "error", "from", "finish", "answer", "calls")
SOURCES = ("", "memory", "disk")
TERM = re.compile(r'(?P<no>-?)(?:(?P<key>[a-z_]+):)?(?:"(?P<phrase>[^"]*)"|(?P<word>\S*))')


def number(requests: dict[str, Any], key: str, row: int) -> float:
    """The number in a column; times in milliseconds."""
    value = requests[key][row]
    return value / 10 if key.endswith("_ms") else value


def text(requests: dict[str, Any], key: str, row: int) -> str:
    """The text in a column."""
    if key == "reason":
        return requests["reasons"][requests["reason"][row]]
    if key == "error":
        return requests["errors"][requests["error"][row]]
    if key == "from":
        return SOURCES[requests["from"][row]]
    if key == "finish":
        return requests["finishes"][requests["finish"][row]]
    if key == "calls":
        return " ".join(f"{call['name']} {call['arguments']}" for call in requests["calls"][row] or [])
    return requests[key][row]


def ordered(requests: dict[str, Any], rows: list[int], key: str, descending: bool) -> list[int]:
    """The rows by a column; equal ones stay in OUT's order. Texts are compared as browsers do, by UTF-16 units."""
    if key in NUMBERS:
        return sorted(rows, key=lambda row: (-1 if descending else 1) * number(requests, key, row))
    units = {row: _gist(requests, key, row).encode("utf-16-be", "surrogatepass") for row in rows}
    ranks = {value: place for place, value in enumerate(sorted(set(units.values())))}
    return sorted(rows, key=lambda row: (-1 if descending else 1) * ranks[units[row]])


def chosen(requests: dict[str, Any], words: str) -> list[int]:
    """The rows of which every term holds."""
    rows = list(range(len(requests["id"])))
    for found in TERM.finditer(words):
        if found[0]:
            key, wanted = found["key"], found["phrase"] if found["phrase"] is not None else found["word"]
            if key is not None and key not in (*NUMBERS, *TEXTS):  # http://x
                key, wanted = None, f"{key}:{wanted}"
            rows = [row for row in rows if _holds(requests, row, key, wanted.lower()) != bool(found["no"])]
    return rows


def _gist(requests: dict[str, Any], key: str, row: int) -> str:
    if key != "answer":
        return text(requests, key, row)
    return text(requests, "error", row) or requests["answer"][row][:300] or text(requests, "calls", row)[:300]


def _holds(requests: dict[str, Any], row: int, key: str | None, wanted: str) -> bool:
    if key is None:
        prompts = requests["prompt_text"] or [""] * (row + 1)
        said = prompts[row] if isinstance(prompts[row], str) else "\n".join("\n".join(one) for one in prompts[row])
        everywhere = [text(requests, name, row) for name in ("id", "reason", "error", "answer", "calls")]
        return any(wanted in one.lower() for one in [*everywhere, said])
    if key in TEXTS:
        found = text(requests, key, row).lower()
        return wanted in found if wanted else found != ""
    value = number(requests, key, row)
    if ".." in wanted:
        first, last = wanted.split("..")
        return float(first) <= value <= float(last)
    for sign, holds in ((">=", operator.ge), ("<=", operator.le), (">", operator.gt), ("<", operator.lt)):
        if wanted.startswith(sign):
            return bool(holds(value, float(wanted[len(sign) :])))
    return value == float(wanted) if wanted else value > 0
