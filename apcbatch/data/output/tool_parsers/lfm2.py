"""LFM2: `<|tool_call_start|>[f(a="b", n=1), g()]<|tool_call_end|>`, one list of all calls, in the syntax of Python.

Values are strings, numbers, True, False, None, lists and dictionaries, which may contain each other; true, false and
null are read too. Nothing is evaluated. Inside the same markers the model writes JSON calls where a prompt asks for
JSON, and a grammar forces these. Source: Liquid AI's model cards of LFM2, and its chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from apcbatch.data.json_text import read_json
from apcbatch.data.output.json_calls import json_reader, skip_blank
from apcbatch.data.output.tool_parser import Call, CallSyntax, ToolParser, call_of, find_marked

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
_LIST = "<|tool_list_start|>"
_MARKER = re.compile(re.escape(BEGIN))
_READ_JSON = json_reader(END)
_JSON_BEGIN = re.compile(r"\s*(?:\[\s*)?\{")
_NAME = re.compile(r"[^\s()\[\]{}<>,=:'\"]+")
_STRING = re.compile(r"\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]{1,400}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)"
_ESCAPED = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_DEEPEST = 100


class _MalformedError(Exception):
    """The text is not a list of calls."""


class _Reader:
    """Parser of one list of calls. place: index of the next character; each is read once."""

    def __init__(self, text: str, place: int) -> None:
        self.text, self.place, self._depth = text, place, 0

    def calls(self) -> list[Call]:
        found: list[Call] = []
        self._expect("[")
        self._items("]", lambda: found.append(self._call()))
        return found

    def _call(self) -> Call:
        name, arguments = self._name(), {}

        def argument() -> None:
            key = self._name()
            self._expect("=")
            arguments[key] = self._value()

        self._expect("(")
        self._items(")", argument)
        call = call_of(name, arguments)
        if call is None:
            raise _MalformedError
        return call

    def _value(self) -> Any:
        self.place = skip_blank(self.text, self.place)
        if (string := _STRING.match(self.text, self.place)) is not None:
            self.place = string.end()
            return _unescaped(string[1] if string[1] is not None else string[2])
        if (number := _NUMBER.match(self.text, self.place)) is not None:
            self.place = number.end()
            return _number(number[0])
        if self._take("["):
            return self._nested("]", [], lambda items: items.append(self._value()))
        if self._take("{"):
            return self._nested("}", {}, self._entry)
        word = self._name()
        if word not in _WORDS:
            raise _MalformedError
        return _WORDS[word]

    def _entry(self, entries: dict[str, Any]) -> None:
        key = self._value()
        if not isinstance(key, str):
            raise _MalformedError
        self._expect(":")
        entries[key] = self._value()

    def _nested(self, close: str, into: Any, item: Callable[[Any], None]) -> Any:
        """Add the items up to `close` to a list or a dictionary, and return it."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _MalformedError
        self._items(close, lambda: item(into))
        self._depth -= 1
        return into

    def _items(self, close: str, item: Callable[[], None]) -> None:
        """Parse items up to `close`, with commas between them, and optionally after the last."""
        while not self._take(close):
            item()
            if not self._take(","):
                self._expect(close)
                return

    def _name(self) -> str:
        self.place = skip_blank(self.text, self.place)
        name = _NAME.match(self.text, self.place)
        if name is None:
            raise _MalformedError
        self.place = name.end()
        return name[0]

    def _take(self, mark: str) -> bool:
        self.place = skip_blank(self.text, self.place)
        is_there = self.text.startswith(mark, self.place)
        self.place += len(mark) if is_there else 0
        return is_there

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise _MalformedError


def _number(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:  # 007
        raise _MalformedError from None


def _unescaped(text: str) -> str:
    """Replace the escapes of a Python string; an unknown one stays, as in Python. The two halves of a surrogate pair,
    as JSON has them, become one character."""

    def replaced(escape: re.Match[str]) -> str:
        code = escape[1]
        if len(code) > 1:
            number = int(code[1:], 16)
            return chr(number) if number <= 0x10FFFF else escape[0]
        return code if code in "\\'\"/" else _ESCAPED.get(code, escape[0])

    replaced_all = re.sub(_ESCAPE, replaced, text, flags=re.DOTALL)
    return replaced_all.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _read(text: str, place: int) -> tuple[list[Call] | None, int]:
    if _JSON_BEGIN.match(text, place) is not None:
        return _READ_JSON(text, place)
    reader = _Reader(text, place)
    try:
        calls = reader.calls()
    except _MalformedError:
        return None, reader.place
    after = skip_blank(text, reader.place)
    if not calls or not text.startswith(END, after):
        return None, reader.place
    return calls, after + len(END)


PARSER = ToolParser(
    name="lfm2",
    markers=(BEGIN, END),
    syntax=CallSyntax(f"{BEGIN}[", '{"name": "', '", "arguments": ', "}", separator=", ", end=f"]{END}"),
    detects=lambda text: BEGIN in text or _LIST in text,
    find=lambda text, tools: find_marked(text, _MARKER, _read),
)
