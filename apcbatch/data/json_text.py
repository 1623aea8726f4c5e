"""Read and write JSON so that numbers keep their values: with orjson where it is exact, else with Python's `json`.

orjson reads integers beyond 64 bits as floats and refuses to write them. It refuses to read numbers beyond the range of
floats (1e400), and writes a number that is not finite as null. `json` reads and writes integers of up to 4,300 digits,
Python's limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

import orjson

# Maps every digit to 0 and other bytes to spaces, so that a plain search finds long numbers. This takes half as long as
# parsing with orjson.
_ZEROS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_WIDE = b"0" * 19  # an integer of fewer digits fits into 64 bits
_TOO_LARGE, _TOO_WIDE = "number is infinity", "Integer exceeds 64-bit range"  # messages of orjson
_MOST_DIGITS = 4300  # Python's own limit of an integer
_BEYOND = re.compile(f"[0-9]{{{_MOST_DIGITS + 1}}}")


class OddNumber(float):
    """A number that JSON does not have: NaN, Infinity or -Infinity."""


def read_json(text: bytes | str) -> Any:
    """Parse a JSON text, with the numbers that `json.loads` gives; JSONDecodeError, a ValueError, for other text."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if not error.msg.startswith(_TOO_LARGE):
            raise
        return _read_exactly(data)
    return _read_exactly(data) if _WIDE in data.translate(_ZEROS) else value


def read_python_json(text: bytes) -> Any:
    """Parse a JSON text that Python wrote, with an OddNumber for each NaN, Infinity and -Infinity. ValueError for other
    text."""
    return _read_exactly(text, OddNumber)


def json_or_text(value: Any) -> Any:
    """Parse a JSON text; return any other text, and any other value, unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value


def schema_at(schema: Any, reference: str) -> Any:
    """Return the schema that a `$ref` within `schema` names by a JSON pointer (RFC 6901). For any other reference
    return True, the schema of any value."""
    first, *names = reference.split("/")
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name, True) if isinstance(schema, dict) else True
    return schema if first == "#" else True


def write_json(value: object) -> str:
    """Write a value as compact JSON; ValueError if JSON cannot express it, as for a number that is not finite."""
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        if str(error) != _TOO_WIDE:
            raise ValueError(str(error)) from None
        text = ""
    if text and "null" not in text:
        return text
    try:
        exact = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        exact.encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return text or exact


def _read_exactly(data: bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse with `json`, but refuse half a surrogate pair as orjson does, and NaN as well without parse_constant.
    ValueError for other text, JSONDecodeError if it is UTF-8."""
    text = data.decode()
    try:
        value = json.loads(text, parse_constant=parse_constant or _refuse)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError:
        raise
    except RecursionError:
        reason = "nested too deeply"
    except UnicodeError:
        reason = "half of a surrogate pair"
    except ValueError:  # Python's limit of digits
        reason = f"an integer of more than {_MOST_DIGITS:,} digits"
    place = _BEYOND.search(text)
    raise json.JSONDecodeError(reason, text, place.start() if place else 0)


def _refuse(word: str) -> NoReturn:
    raise json.JSONDecodeError(f"{word} is no number of JSON", word, 0)
