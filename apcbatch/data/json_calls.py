"""Tool calls that are written as JSON: one object with a name and arguments, or a list of such objects.

Must not know: any one family, tokens, records.
"""

from __future__ import annotations

import json
import re
from typing import Any

from apcbatch.data.json_text import read_json
from apcbatch.data.tool_parser import Call, Reader, call_of

BLANK = re.compile(r"\s*")
_DECODER = json.JSONDecoder()
_FIRST_CHARACTERS = 256
_LONGEST_WORD = 16  # of JSON that an error may stand before: -Infinity, an escape


def json_value(text: str, place: int) -> tuple[Any, int] | None:
    """The JSON object or list that begins at a place, blanks before it aside, and where it ends; None for none.

    A value that fails, fails where it stops being JSON: at the next marker at the latest, but for one in a string. And
    no more is read than eight times the characters up to there. So trying at each marker of a text costs no square.
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
    """How long the JSON value is that begins at a place; None if it is none.

    orjson does not say where a value ends, and `json` counts lines up to an error: so it sees a piece of the text, and
    a longer one if it fails at the end of that.
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
    """The calls that a value is: an object, or a list of objects. None if one of them is no call, or if there is none.

    The arguments stand under `arguments` or `parameters`. OpenAI's own form, with a `function`, is read too.
    """
    found: list[Call] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            return None
        parts = item["function"] if isinstance(item.get("function"), dict) and "name" not in item else item
        if not parts.keys() & {"arguments", "parameters"} and parts.keys() - {"name", "id", "type"}:
            return None  # a slip of the key is no call without arguments
        arguments = parts["arguments"] if "arguments" in parts else parts.get("parameters")
        call = call_of(parts.get("name"), arguments, item.get("id"))
        if call is None:
            return None
        found.append(call)
    return found or None


def json_reader(end_marker: str) -> Reader:
    """A reader of JSON calls that an end marker follows; without one, of JSON calls alone."""

    def read(text: str, place: int) -> tuple[list[Call] | None, int]:
        found = json_value(text, place)
        if found is None:
            return None, place
        value, end = found
        if end_marker:
            behind = skip_blank(text, end)
            if not text.startswith(end_marker, behind):
                return None, end
            end = behind + len(end_marker)
        return calls_in(value), end

    return read


def skip_blank(text: str, place: int) -> int:
    """The first place from here on that is not blank."""
    found = BLANK.match(text, place)
    return found.end() if found is not None else place
