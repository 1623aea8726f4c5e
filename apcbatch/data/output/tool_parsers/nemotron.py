"""Nemotron: `<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>`, one list of all calls.

Source: the chat templates of Llama Nemotron and Nemotron Nano 2.
"""

from __future__ import annotations

import re

from apcbatch.data.output.json_calls import json_reader
from apcbatch.data.output.tool_parser import CallSyntax, ToolParser, find_marked

BEGIN, END = "<TOOLCALL>", "</TOOLCALL>"
_MARKER, _READ = re.compile(BEGIN), json_reader(END)

PARSER = ToolParser(
    name="nemotron",
    markers=(BEGIN, END),
    syntax=CallSyntax(f"{BEGIN}[", '{"name": "', '", "arguments": ', "}", separator=", ", end=f"]{END}"),
    detects=lambda text: BEGIN in text,
    find=lambda text, tools: find_marked(text, _MARKER, _READ),
)
