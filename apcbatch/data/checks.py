"""Check single values of a parsed line, and word the errors.

A check returns the value with its type, or raises RequestError (invalid_request). The error says where the value
stands, what it is, and what was expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson

from apcbatch.errors import RequestError

_SHOWN_CHARACTERS = 40
_SHOWN_KEYS = 8


def invalid(message: str) -> RequestError:
    """Make an invalid_request error; the caller adds the line."""
    return RequestError("invalid_request", message)


def at_line(error: RequestError, line: int) -> RequestError:
    """Copy an error and add its input line."""
    return RequestError(error.code, error.message, line)


def shown(value: object) -> str:
    """Show a value in a sentence: as short JSON if it is a scalar, else as `a list` or `an object`."""
    if isinstance(value, str):
        short = value if len(value) <= _SHOWN_CHARACTERS else value[: _SHOWN_CHARACTERS - 3] + "..."
        return orjson.dumps(short.encode("utf-8", "replace").decode()).decode()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)[:_SHOWN_CHARACTERS]
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence):
        return "a list"
    return f"a {type(value).__name__}"


def shown_keys(keys: Iterable[object]) -> str:
    """Show the first keys of an object in a sentence, or `none`."""
    return ", ".join(shown(str(key)) for key in islice(keys, _SHOWN_KEYS)) or "none"


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's text, at most 300 characters, as a clause; without a text, the error's
    type."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:300] if lines else type(error).__name__


def one_of(choices: Sequence[str]) -> str:
    """List choices in a sentence: `a, b or c`."""
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def is_integer(value: object) -> bool:
    """Return whether a value is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def wrong(where: str, value: object, expected: str) -> RequestError:
    """Make the error `WHERE is VALUE; expected EXPECTED`."""
    return invalid(f"{where} is {shown(value)}; expected {expected}")


def missing(where: str, expected: str) -> RequestError:
    """Make the error `WHERE is missing; expected EXPECTED`."""
    return invalid(f"{where} is missing; expected {expected}")


def need_object(value: object, where: str, expected: str = "an object") -> dict[str, Any]:
    """Check that a value is an object; return it."""
    if not isinstance(value, dict):
        raise wrong(where, value, expected)
    return value


def required(record: Mapping[str, Any], key: str, where: str, expected: str) -> Any:
    """Return record[key], of any type; RequestError if it is absent."""
    if key not in record:
        raise missing(where, expected)
    return record[key]


def need_string(record: Mapping[str, Any], key: str, where: str, expected: str = "a string") -> str:
    """Return record[key] if it is a string; RequestError if it is absent or of another type."""
    value = required(record, key, where, expected)
    if not isinstance(value, str):
        raise wrong(where, value, expected)
    return value


def optional_string(record: Mapping[str, Any], key: str, where: str) -> str | None:
    """Return record[key] if it is a string, None if it is absent or null; RequestError for another type."""
    value = record.get(key)
    if value is not None and not isinstance(value, str):
        raise wrong(where, value, "a string")
    return value


def optional_flag(record: Mapping[str, Any], key: str, where: str) -> bool | None:
    """Return record[key] if it is a boolean, None if it is absent or null; RequestError for another type."""
    value = record.get(key)
    if value is not None and not isinstance(value, bool):
        raise wrong(where, value, "true or false")
    return value


def optional_number(record: Mapping[str, Any], key: str, where: str, low: float, high: float) -> float | None:
    """Return record[key] as a float from low to high, None if it is absent or null; RequestError for another value."""
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise wrong(where, value, f"a number from {low:g} to {high:g}")
    return float(value)
