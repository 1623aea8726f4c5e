"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]`, one list of all calls.

From version 11 of its tokenizer on: `[TOOL_CALLS]f[ARGS]{"a": 1}` for each call, for some models with
`[CALL_ID]abcdefghi` before `[ARGS]`.

Source: mistral-common, and the chat templates of Mistral 7B v0.3 to Mistral Small 3.2.
"""

from __future__ import annotations

import re

from apcbatch.data.output.json_calls import calls_in, json_value
from apcbatch.data.output.tool_parser import Call, CallSyntax, ToolParser, call_of, find_marked

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MARKER = re.compile(re.escape(BEGIN))
_NAME = re.compile(r"\s*([\w.:/-]{1,256})(?:\[CALL_ID\](\w{1,64}))?(?:\[ARGS\])?")


def _read(text: str, place: int) -> tuple[list[Call] | None, int]:
    found = json_value(text, place)
    if found is not None:
        return calls_in(found[0]), found[1]
    named = _NAME.match(text, place)
    arguments = json_value(text, named.end()) if named is not None else None
    if named is None or arguments is None:
        return None, place
    call = call_of(named[1], arguments[0], named[2])
    return ([call] if call is not None else None), arguments[1]


PARSER = ToolParser(
    name="mistral",
    markers=(BEGIN, CALL_ID, ARGS),
    syntax=CallSyntax(f"{BEGIN}[", '{"name": "', '", "arguments": ', "}", separator=", ", end="]"),
    detects=lambda text: BEGIN in text,
    find=lambda text, tools: find_marked(text, _MARKER, _read),
    id_format="nine",
)
