"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`, one block for each call.

Source: the chat templates of Hermes 2 Pro, Qwen 2.5, Qwen 3 and Granite 4.
"""

from __future__ import annotations

import re

from apcbatch.data.output.json_calls import json_reader
from apcbatch.data.output.tool_parser import CallSyntax, ToolParser, find_marked

BEGIN, END = "<tool_call>", "</tool_call>"
_MARKER, _READ = re.compile(BEGIN), json_reader(END)

PARSER = ToolParser(
    name="hermes",
    markers=(BEGIN, END),
    syntax=CallSyntax(
        f"{BEGIN}\n", '{"name": "', '", "arguments": ', "}", separator=f"\n{END}\n{BEGIN}\n", end=f"\n{END}"
    ),
    detects=lambda text: BEGIN in text and END in text and "<function=" not in text,
    find=lambda text, tools: find_marked(text, _MARKER, _READ),
)
