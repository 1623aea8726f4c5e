"""Qwen Coder: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, values as plain text.

A value is converted by the tool's schema (data/output/typed_arguments.py). Values are not escaped, so a value ends only
at a `</parameter>` that is followed by the next parameter or by the end of the function. `<tool_call>` may be missing,
since the model often leaves it out. Source: the chat templates of Qwen 3 Coder and Qwen 3.5.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from apcbatch.data.input.messages import Tool
from apcbatch.data.output.json_calls import skip_blank
from apcbatch.data.output.tool_parser import Call, CallSyntax, Found, ToolParser, call_of, find_marked
from apcbatch.data.output.typed_arguments import parameters_of, typed

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION_END = "</function>"
_MARKER = re.compile(rf"{BEGIN}\s*(?=<function=)|(?=<function=)|{BEGIN}")
_FUNCTION = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")


def _find(text: str, tools: Sequence[Tool]) -> Found:
    ends = [place.start() for place in _VALUE_END.finditer(text)]

    def read(text: str, place: int) -> tuple[list[Call] | None, int]:
        """Parse the call at a place: a Reader. After a malformed call the search continues where parsing failed, so
        each character is read once."""
        function = _FUNCTION.match(text, place)
        if function is None:
            return None, place + 1 if text.startswith("<function=", place) else place
        place = skip_blank(text, function.end())
        schemas = parameters_of(tools, function[1])
        arguments: dict[str, Any] = {}
        while (parameter := _PARAMETER.match(text, place)) is not None:
            index = bisect_left(ends, parameter.end())
            if index == len(ends):
                return None, parameter.end()
            arguments[parameter[1]] = typed(_bare(text[parameter.end() : ends[index]]), schemas.get(parameter[1]))
            place = skip_blank(text, ends[index] + len("</parameter>"))
        if not text.startswith(_FUNCTION_END, place):
            return None, place
        place += len(_FUNCTION_END)
        after = skip_blank(text, place)
        call = call_of(function[1], arguments)
        return ([call] if call is not None else None), after + len(END) if text.startswith(END, after) else place

    return find_marked(text, _MARKER, read)


def _bare(value: str) -> str:
    """Remove the line end that the template writes before a value, and the one after it."""
    return value.removeprefix("\n").removesuffix("\n")


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
