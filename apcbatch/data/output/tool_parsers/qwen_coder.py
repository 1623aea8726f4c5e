"""Qwen Coder: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, values as plain text.

A value is converted by the tool's schema (data/output/typed_arguments.py). Values are not escaped: a value may show
whole calls, and ends at a `</parameter>` that is followed by the next parameter or by the end of its own function. The
model often leaves out `<tool_call>`, and sometimes the `</parameter>` before another parameter of the tool, which then
begins a line. Source: the chat templates of Qwen 3 Coder and Qwen 3.5.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from apcbatch.data.conversation import Tool
from apcbatch.data.output.json_calls import skip_blank
from apcbatch.data.output.tool_parser import Call, CallSyntax, Found, ToolParser, call_of, find_marked
from apcbatch.data.output.typed_arguments import Parameters

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION_END, _VALUE_END = "</function>", "</parameter>"
_MARKER = re.compile(rf"{BEGIN}\s*(?=<function=)|(?=<function=)|{BEGIN}")
_FUNCTION = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_TAG = re.compile(
    rf"<(?P<tag>function|parameter)=(?P<name>[^<>\n]+)>|{_FUNCTION_END}"
    rf"|{_VALUE_END}(?=\s*(?:<parameter=|{_FUNCTION_END}))"
)


@dataclass(slots=True)
class _Level:
    """Tags of one function, without those of functions nested in it. Places are ascending indices of characters.

    ends: places of `</parameter>`. begins, names: places and names of parameters that begin a line within a value.
    proper: names of the other parameters."""

    ends: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    proper: set[str] = field(default_factory=set)


def _levels(text: str) -> tuple[_Level, dict[int, _Level]]:
    """Return the ends of all values of the text, as one level, and the level of each function that has an end, by its
    place."""
    whole, levels = _Level(), dict[int, _Level]()
    stack: list[tuple[int, _Level]] = []
    may_be_proper, after = False, 0  # of a parameter behind the last tag; where that tag ends
    for tag in _TAG.finditer(text):
        place, name = tag.start(), tag["name"]
        if tag["tag"] == "function":
            stack.append((place, _Level()))
        elif tag["tag"] == "parameter" and stack:
            level = stack[-1][1]
            if may_be_proper and not text[after:place].strip():
                level.proper.add(_name(name))
            elif text.startswith("\n", place - 1):
                level.begins.append(place)
                level.names.append(_name(name))
        elif tag[0] == _VALUE_END:
            whole.ends.append(place)
            if stack:
                stack[-1][1].ends.append(place)
        elif tag[0] == _FUNCTION_END and stack:
            begin, level = stack.pop()
            levels[begin] = level
        may_be_proper, after = tag["tag"] == "function" or tag[0] == _VALUE_END, tag.end()
    return whole, levels


def _arguments(text: str, place: int, parameters: Parameters, level: _Level) -> tuple[dict[str, Any] | None, int]:
    """Read the parameters from a place on, and the end of their function. Return (arguments by name, end of the
    function), or (None, place of what cannot be read). level: tags that may end a value."""
    arguments: dict[str, Any] = {}
    place = skip_blank(text, place)
    while (parameter := _PARAMETER.match(text, place)) is not None:
        name, begin = _name(parameter[1]), parameter.end()
        index = bisect_left(level.ends, begin)
        if index == len(level.ends):
            return None, begin
        end = level.ends[index]
        place = end + len(_VALUE_END)
        for at in range(bisect_left(level.begins, begin), bisect_left(level.begins, end)):
            other = level.names[at]
            if other in parameters and other not in level.proper and other not in (name, *arguments):
                place = end = level.begins[at]  # its `</parameter>` is left out
                break
        arguments[name] = parameters.typed(name, _bare(text[begin:end]))
        place = skip_blank(text, place)
    if not text.startswith(_FUNCTION_END, place):
        return None, place
    return arguments, place + len(_FUNCTION_END)


def _find(text: str, tools: Sequence[Tool]) -> Found:
    whole, levels = _levels(text)

    def read(text: str, place: int) -> tuple[list[Call] | None, int]:
        """Parse the call at a place: a Reader. After a malformed call the search continues where parsing failed, so
        each character is read twice at most."""
        function = _FUNCTION.match(text, place)
        if function is None:
            return None, place + 1 if text.startswith("<function=", place) else place
        name = _name(function[1])
        parameters, level = Parameters(tools, name), levels.get(place)
        arguments, end = (None, place) if level is None else _arguments(text, function.end(), parameters, level)
        if arguments is None:
            arguments, end = _arguments(text, function.end(), parameters, whole)
        if arguments is None:
            return None, end
        after = skip_blank(text, end)
        call = call_of(name, arguments)
        return ([call] if call is not None else None), after + len(END) if text.startswith(END, after) else end

    return find_marked(text, _MARKER, read)


def _name(written: str) -> str:
    """Remove the quotes and blanks that a model may write around a name."""
    name = written.strip()
    return name[1:-1] if len(name) > 2 and name[0] == name[-1] and name[0] in "\"'" else name


def _bare(value: str) -> str:
    """Remove the line end that the template writes before a value, and the one after it."""
    value = value.removeprefix("\r\n") if value.startswith("\r\n") else value.removeprefix("\n")
    return value.removesuffix("\r\n") if value.endswith("\r\n") else value.removesuffix("\n")


PARSER = ToolParser(
    name="qwen-coder",
    markers=(BEGIN, END),
    syntax=CallSyntax(
        f"{BEGIN}\n",
        "<function=",
        ">\n",
        f"{_FUNCTION_END}\n",
        separator=f"{END}\n{BEGIN}\n",
        end=END,
        arguments="xml",
    ),
    detects=lambda text: "<function=" in text and "<parameter=" in text,
    find=_find,
    reads_tools=True,
)
