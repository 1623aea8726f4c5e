"""What a number on the page says to a reader, as a number again: "3.2 GiB" is 3.2 * 2^30, to half of its last digit.

Written from what an operator would read, and not from the page's own scripts.
"""

from __future__ import annotations

import re

UNITS = {
    "": 1.0, "%": 0.01, "byte": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
    "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "token": 1.0, "token/s": 1.0, "request": 1.0,
}  # fmt: skip
UNKNOWN = ("–", "—", "-", "")
PART = re.compile(r"([\d,]+)(?:\.(\d+))?\s*([A-Za-z%/]*)")
BOUND = re.compile(r"(under|over) (.*)")


def agrees(text: str, value: float | None) -> bool:
    """Whether `text` is what a reader may be told of `value`: the number, rounded where it was shortened; None as a
    dash. A text in which no number is read agrees with nothing."""
    text = text.strip()
    if value is None or text in UNKNOWN:
        return value is None and text in UNKNOWN
    if bound := BOUND.fullmatch(text):
        limit, _ = amount(bound[2])
        return 0 < value < limit if bound[1] == "under" else limit < value
    shown, half = amount(text)
    return abs(shown - value) <= half * (1 + 1e-9)


def amount(text: str) -> tuple[float, float]:
    """(the number that a text says, half of its last digit). Raises ValueError if it is none."""
    sign, text = (-1, text[1:]) if text[:1] in "-−" else (1, text)
    parts = PART.findall(text)
    if not parts or PART.sub("", text).strip() or not all(re.fullmatch(r"\d{1,3}(,\d{3})*", one[0]) for one in parts):
        raise ValueError(f"{text!r} is not a number with a unit; groups of three digits are set apart by commas")
    total, half = 0.0, 0.0
    for whole, fraction, unit in parts:
        name = re.sub(r"(?<=[a-z]{3})s\b", "", unit)  # tokens/s -> token/s, bytes -> byte
        if name not in UNITS:
            raise ValueError(f"{text!r} has the unit {unit!r}, which a reader may not know")
        total += float(f"{whole.replace(',', '')}.{fraction or 0}") * UNITS[name]
        half = UNITS[name] * 10.0 ** -len(fraction) / 2
    return sign * total, half
