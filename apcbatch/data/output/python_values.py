"""Read values in the syntax of Python, as models write them in calls. Nothing is evaluated.

Values are strings (with escapes, triple-quoted, raw, adjacent ones), numbers (`+5`, `.5`, `1_000`), True, False, None,
tuples, lists and dictionaries; true, false and null are read too. A tuple becomes a list, an integer as a key a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from apcbatch.data.json_text import read_json
from apcbatch.data.output.json_calls import skip_blank

_NAME = re.compile(r"[^\s()\[\]{}<>,=:'\"]+")
_STRING = re.compile(
    r"([rR]?)"
    r'(?:"""((?:[^"\\]|\\.|"(?!""))*)"""'
    r"|'''((?:[^'\\]|\\.|'(?!''))*)'''"
    r'|"((?:[^"\\]|\\.)*)"'
    r"|'((?:[^'\\]|\\.)*)')",
    re.DOTALL,
)
_DIGITS = "[0-9](?:_?[0-9])*"
_NUMBER = re.compile(rf"([+-]?)(?:([0-9](?:_?[0-9]){{0,399}})(\.(?:{_DIGITS})?)?|(\.{_DIGITS}))([eE][+-]?{_DIGITS})?")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)"
_ESCAPED = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_DEEPEST = 100


class MalformedError(Exception):
    """The text is not in this syntax."""


class PythonReader:
    """Reader of a text from a place on; its methods raise MalformedError. place: index of the next character; each
    character is read once."""

    def __init__(self, text: str, place: int = 0) -> None:
        self.text, self.place, self._depth = text, place, 0

    def value(self) -> Any:
        """Read one value."""
        self.skip_blank()
        if (string := _STRING.match(self.text, self.place)) is not None:
            return self._strings(string)
        if (number := _NUMBER.match(self.text, self.place)) is not None:
            self.place = number.end()
            return _number(number)
        items: list[Any] = []
        if self.take("["):
            self._nested("]", lambda: items.append(self.value()))
            return items
        if self.take("("):
            has_comma = self._nested(")", lambda: items.append(self.value()))
            return items if has_comma or not items else items[0]  # (5) is 5, (5,) a tuple
        if self.take("{"):
            entries: dict[str, Any] = {}
            self._nested("}", lambda: self._entry(entries))
            return entries
        word = self.name()
        if word not in _WORDS:
            raise MalformedError
        return _WORDS[word]

    def items(self, close: str, item: Callable[[], None]) -> bool:
        """Read items up to `close`, with commas between them, and optionally after the last. Return whether there is
        a comma."""
        has_comma = False
        while not self.take(close):
            item()
            if not self.take(","):
                self.expect(close)
                break
            has_comma = True
        return has_comma

    def name(self) -> str:
        """Read a name."""
        self.skip_blank()
        name = _NAME.match(self.text, self.place)
        if name is None:
            raise MalformedError
        self.place = name.end()
        return name[0]

    def take(self, mark: str) -> bool:
        """Skip blanks, and the mark if it is there; return whether it is."""
        self.skip_blank()
        is_there = self.text.startswith(mark, self.place)
        self.place += len(mark) if is_there else 0
        return is_there

    def expect(self, mark: str) -> None:
        """Skip blanks and the mark."""
        if not self.take(mark):
            raise MalformedError

    def skip_blank(self) -> None:
        """Go to the next character that is not blank."""
        self.place = skip_blank(self.text, self.place)

    def _strings(self, string: re.Match[str] | None) -> str:
        """Read a string and those that follow it directly, as one."""
        parts: list[str] = []
        while string is not None:
            self.place = string.end()
            text = next(part for part in string.groups()[1:] if part is not None)
            parts.append(text if string[1] else _unescaped(text))
            self.skip_blank()
            string = _STRING.match(self.text, self.place)
        return "".join(parts)

    def _entry(self, entries: dict[str, Any]) -> None:
        key = self.value()
        key = str(key) if type(key) is int else key
        if not isinstance(key, str):
            raise MalformedError
        self.expect(":")
        entries[key] = self.value()

    def _nested(self, close: str, item: Callable[[], None]) -> bool:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise MalformedError
        has_comma = self.items(close, item)
        self._depth -= 1
        return has_comma


def python_value(text: str) -> Any:
    """Read a text that is one value, with blanks around it; ValueError for any other."""
    reader = PythonReader(text)
    try:
        value = reader.value()
    except MalformedError:
        raise ValueError("not in the syntax of Python") from None
    reader.skip_blank()
    if reader.place < len(text):
        raise ValueError("text follows the value")
    return value


def _number(found: re.Match[str]) -> Any:
    """Return the number that JSON gives for the same digits: without underscores and a plus, with a digit on both sides
    of the point."""
    sign, whole, fraction, only_fraction, exponent = (part or "" for part in found.groups())
    fraction = fraction + "0" if fraction == "." else fraction or only_fraction
    text = "".join((sign.strip("+"), whole or "0", fraction, exponent)).replace("_", "")
    try:
        return read_json(text)
    except ValueError:  # 007
        raise MalformedError from None


def _unescaped(text: str) -> str:
    """Replace the escapes of a Python string; an unknown one stays, as in Python. The two halves of a surrogate pair,
    as JSON has them, become one character."""

    def replaced(escape: re.Match[str]) -> str:
        code = escape[1]
        if digits := code[1:]:
            number = int(digits, 16)
            return chr(number) if number <= 0x10FFFF else escape[0]
        return code if code in "\\'\"/" else _ESCAPED.get(code, escape[0])

    replaced_all = re.sub(_ESCAPE, replaced, text, flags=re.DOTALL)
    return replaced_all.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
