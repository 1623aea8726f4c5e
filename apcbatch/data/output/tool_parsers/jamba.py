"""Jamba: `<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>`, one list of all calls.

Source: the chat templates of Jamba 1.5 and later, whose markers are special tokens.
"""

from __future__ import annotations

import re

from apcbatch.data.output.json_calls import json_reader
from apcbatch.data.output.tool_parser import CallSyntax, ToolParser, find_marked

BEGIN, END = "<tool_calls>", "</tool_calls>"
_MARKER, _READ = re.compile(BEGIN), json_reader(END)

PARSER = ToolParser(
    name="jamba",
    markers=(BEGIN, END),
    syntax=CallSyntax(f"{BEGIN}[\n    ", '{"name": "', '", "arguments": ', "}", separator=",\n    ", end=f"\n]{END}"),
    detects=lambda text: BEGIN in text,
    find=lambda text, tools: find_marked(text, _MARKER, _READ),
)
