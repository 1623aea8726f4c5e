"""Parse tool calls that are written as JSON: an object with a name and arguments, or a list of such objects."""

from __future__ import annotations

import json
import re
from typing import Any

from apcbatch.data.json_text import read_json
from apcbatch.data.output.tool_parser import Call, Reader, call_of

BLANK = re.compile(r"\s*")
_DECODER = json.JSONDecoder()
_FIRST_CHARACTERS = 256
_LONGEST_WORD = 16  # upper bound of characters of a JSON token that a cut may split: -Infinity, an escape


def json_value(text: str, place: int) -> tuple[Any, int] | None:
    """Parse the JSON object or list at a place, after any blanks; return (value, its end), or None if there is none.

    place, end: indices in characters. Parsing stops at the first character that cannot continue the JSON; the next
    marker of calls is such a place, unless it is in a string. About eight times the characters up to there are read at
    most, so trying every marker of a text does not take quadratic time.
    """
    begin = skip_blank(text, place)
    if not text.startswith(("{", "["), begin):
        return None
    length = _length(text, begin)
    if length is None:
        return None
    try:
        return read_json(text[begin : begin + length]), begin + length
    except ValueError:
        return None


def _length(text: str, begin: int) -> int | None:
    """Return the length in characters of the JSON value at `begin`; None if there is none.

    `json` finds the end, which orjson does not report. Before `json` reports an error, it counts the lines up to it,
    which is slow in a long text. So it first gets a short piece of the text, and eight times as much whenever it fails
    at the piece's end.
    """
    num_characters = _FIRST_CHARACTERS
    while True:
        piece = text[begin : begin + num_characters]
        try:
            return _DECODER.raw_decode(piece)[1]
        except json.JSONDecodeError as error:
            at_end = error.pos > len(piece) - _LONGEST_WORD or error.msg.startswith("Unterminated string")
            if not at_end or begin + len(piece) == len(text):
                return None
        except (ValueError, RecursionError):  # a number of too many digits; nested too deeply
            return None
        num_characters *= 8


def calls_in(value: object) -> list[Call] | None:
    """Convert an object, or a list of objects, to calls; None if one of them is no call, or if the list is empty.

    The arguments are under `arguments` or `parameters`. OpenAI's form, with these under `function`, is read too.
    """
    found: list[Call] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            return None
        parts = item["function"] if isinstance(item.get("function"), dict) and "name" not in item else item
        if not parts.keys() & {"arguments", "parameters"} and parts.keys() - {"name", "id", "type"}:
            return None  # an object with a misspelt key must not become a call without arguments
        arguments = parts["arguments"] if "arguments" in parts else parts.get("parameters")
        call = call_of(parts.get("name"), arguments, item.get("id"))
        if call is None:
            return None
        found.append(call)
    return found or None


def json_reader(end_marker: str) -> Reader:
    """Make a Reader of the calls in JSON values up to and with `end_marker`; in exactly one value if that is empty."""

    def read(text: str, place: int) -> tuple[list[Call] | None, int]:
        found = json_value(text, place)
        if found is None:
            return None, place
        value, end = found
        if not end_marker:
            return calls_in(value), end
        values = value if isinstance(value, list) else [value]
        while not text.startswith(end_marker, after := skip_blank(text, end)):
            found = json_value(text, after)
            if found is None:
                return None, end
            values += found[0] if isinstance(found[0], list) else [found[0]]
            end = found[1]
        return calls_in(values), after + len(end_marker)

    return read


def skip_blank(text: str, place: int) -> int:
    """Return the index of the first character from `place` on that is not blank."""
    found = BLANK.match(text, place)
    return found.end() if found is not None else place
