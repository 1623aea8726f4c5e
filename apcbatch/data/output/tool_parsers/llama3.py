"""Llama 3: `{"name": "f", "parameters": {"a": 1}}`, with `;` between several calls, and optionally `<|python_tag|>`
before the first.

Source: the chat templates of Llama 3.1 to 3.3. Without the tag, no marker tells a call from an answer in JSON. So an
object is a call only if it has a name and parameters (or arguments) and begins the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from apcbatch.data.conversation import Tool
from apcbatch.data.output.json_calls import calls_in, json_value, skip_blank
from apcbatch.data.output.tool_parser import Call, CallSyntax, Found, ToolParser

TAG = "<|python_tag|>"


def _find(text: str, tools: Sequence[Tool]) -> Found:
    before, tag, _ = text.partition(TAG)
    begin = len(before) if tag else 0
    calls: list[Call] = []
    end, place = begin, begin + len(tag)
    while (found := json_value(text, place)) is not None:
        value, after = found
        made = calls_in(value) if isinstance(value, dict) and value.keys() & {"parameters", "arguments"} else None
        if made is None:
            break
        calls += made
        end = after
        place = skip_blank(text, after)
        if not text.startswith(";", place):
            break
        end = place = place + 1
    rest = text[end:]
    is_malformed = bool(rest.strip()) and bool(tag or calls)
    return Found(text[:begin] + rest, calls, int(is_malformed), begin if tag and calls else None)


PARSER = ToolParser(
    name="llama3",
    markers=(TAG,),
    syntax=CallSyntax("", '{"name": "', '", "parameters": ', "}", separator="; ", end=""),
    detects=lambda text: TAG in text or ("<|start_header_id|>" in text and '"parameters"' in text),
    find=_find,
)
