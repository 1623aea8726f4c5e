"""LFM2: `<|tool_call_start|>[f(a="b", n=1), g()]<|tool_call_end|>`, one list of all calls, in the syntax of Python.

Inside the same markers the model writes JSON calls where a prompt asks for JSON, and a grammar forces these. Source:
Liquid AI's model cards of LFM2, and its chat templates.
"""

from __future__ import annotations

import re
from typing import Any

from apcbatch.data.output.json_calls import json_reader, skip_blank
from apcbatch.data.output.python_values import MalformedError, PythonReader
from apcbatch.data.output.tool_parser import Call, CallSyntax, ToolParser, call_of, find_marked

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
_LIST = "<|tool_list_start|>"
_MARKER = re.compile(re.escape(BEGIN))
_READ_JSON = json_reader(END)
_JSON_BEGIN = re.compile(r"\s*(?:\[\s*)?\{")


def _call(reader: PythonReader) -> Call:
    name = reader.name()
    arguments: dict[str, Any] = {}

    def argument() -> None:
        key = reader.name()
        reader.expect("=")
        arguments[key] = reader.value()

    reader.expect("(")
    reader.items(")", argument)
    call = call_of(name, arguments)
    if call is None:
        raise MalformedError
    return call


def _read(text: str, place: int) -> tuple[list[Call] | None, int]:
    if _JSON_BEGIN.match(text, place) is not None:
        return _READ_JSON(text, place)
    reader = PythonReader(text, place)
    calls: list[Call] = []
    try:
        reader.expect("[")
        reader.items("]", lambda: calls.append(_call(reader)))
    except MalformedError:
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
