"""Llama 3: an answer that is `{"name": "f", "parameters": {"a": 1}}`, several of them with `;` between, and perhaps
`<|python_tag|>` before them.

Source: the chat templates of Llama 3.1 to 3.3. Since no marker tells a bare object from
an answer in JSON, it must have a name and parameters (or arguments), and begin the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from apcbatch.data.input.messages import Tool
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
    return Found(text[:begin] + rest, calls, int(is_malformed))


PARSER = ToolParser(
    name="llama3",
    markers=(TAG,),
    syntax=CallSyntax("", '{"name": "', '", "parameters": ', "}", separator="; ", end=""),
    detects=lambda text: TAG in text or ("<|start_header_id|>" in text and '"parameters"' in text),
    find=_find,
)
