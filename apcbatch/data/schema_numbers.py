"""Whether the grammar library keeps the numbers of a JSON schema: those that it would change are refused.

Must not know: the library's interface, requests. llguidance (1.9) holds each number as a float of 64 bits, reads the
text of one with two roundings (of random floats of 17 digits every tenth becomes a neighbour), and writes integers of
64 bits, the least one aside. Integers up to 2^53 are exact; beyond, only some values and bounds of integers are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

_EXACT = 2**53  # of the integers up to here none shares its float with another one
_BEYOND = 2**63
_LARGEST_PRODUCT = 2**32  # of the steps of two schemas that hold at once: the library goes on from 0 behind it
_VALUES = ("const", "enum")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_WORDS = (*_VALUES, "minimum", "maximum", *_EXCLUSIVE, "multipleOf")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NOTES = ("default", "example", "examples", "title", "description", "$comment")


def check_numbers(schema: object) -> None:
    """ValueError says which number of a schema an answer would not be held to."""
    steps: list[Decimal] = []
    for word, number, holder in _numbers(schema):
        if not _is_kept(word, number, holder):
            raise ValueError(
                f"{word} has the number {str(number)[:40]}, which the grammar library would change, since it counts in "
                "floats of 64 bits; give an integer within 2^53, a float of up to 15 digits, or a string"
            )
        if word == "multipleOf":
            steps.append(abs(Decimal(str(number))))
    digits = max((-int(step.as_tuple().exponent) for step in steps), default=0)
    whole = [int(step.scaleb(digits)) for step in steps]
    if len(whole) > 1 and math.lcm(*whole) * max(whole) >= _LARGEST_PRODUCT:
        raise ValueError("the numbers of multipleOf are too large: what holds at once is multiplied in 32 bits")


def _numbers(schema: object) -> Iterator[tuple[str, int | float, Mapping[str, Any]]]:
    """The keyword, the number and the schema around it, of all that say what an answer may be."""
    left: list[tuple[object, str, Mapping[str, Any]]] = [(schema, "", {})]
    while left:
        value, word, holder = left.pop()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if word:
                yield word, value, holder
        elif isinstance(value, list) or (word and isinstance(value, dict)):
            left += [(one, word, holder) for one in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, dict):
            for key, one in value.items():
                if key in _OF_NAMES and isinstance(one, dict):
                    left += [(inner, "", value) for inner in one.values()]
                elif key not in _NOTES:
                    left.append((one, key if key in _WORDS else "", value))


def _is_kept(word: str, number: int | float, holder: Mapping[str, Any]) -> bool:
    """Whether answers are held to just this number."""
    if isinstance(number, float):
        return abs(number) <= _EXACT and _as_read(number) == number
    is_exclusive = word in _EXCLUSIVE or holder.get(f"exclusive{word.title()}") is True
    if abs(number) < _EXACT or (abs(number) == _EXACT and not is_exclusive):
        return True
    kinds = holder.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if is_exclusive or not -_BEYOND < number < _BEYOND:
        return False
    if word not in _VALUES and ("integer" not in kinds or "number" in kinds):  # bounds of floats are cut by digits
        return False
    return int(float(number)) == number or (word == "maximum" and number == _BEYOND - 1)


def _as_read(number: float) -> float:
    """What the library makes of the text of a float: its digits as an integer, divided by a power of ten."""
    _, digits, exponent = Decimal(repr(abs(number))).as_tuple()
    read, places = float(int("".join(map(str, digits)))), -int(exponent)
    while places > 308:
        read, places = read / 1e308, places - 308
    return math.copysign(read / float(f"1e{places}"), number)
