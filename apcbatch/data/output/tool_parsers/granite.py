"""Granite 3: `<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]`, in 3.1 `<tool_call>[...]`, without an end marker.

Source: the chat templates of Granite 3.0 to 3.3. Granite 4 writes as Hermes does.
"""

from __future__ import annotations

import re

from apcbatch.data.output.json_calls import json_reader
from apcbatch.data.output.tool_parser import CallSyntax, ToolParser, find_marked

BEGIN, OTHER_BEGIN = "<|tool_call|>", "<tool_call>"
_MARKER, _READ = re.compile(f"{re.escape(BEGIN)}|{OTHER_BEGIN}"), json_reader("")

PARSER = ToolParser(
    name="granite",
    markers=(BEGIN, OTHER_BEGIN),
    syntax=CallSyntax(f"{BEGIN}[", '{"name": "', '", "arguments": ', "}", separator=", ", end="]"),
    detects=lambda text: (
        BEGIN in text or ("<|start_of_role|>" in text and OTHER_BEGIN in text and "</tool_call>" not in text)
    ),
    find=lambda text, tools: find_marked(text, _MARKER, _READ),
)
