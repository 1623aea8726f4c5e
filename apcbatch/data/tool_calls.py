"""Tool calls in an answer: `<tool_call>{json}</tool_call>` blocks become OpenAI tool calls.

Must not know: tokens, templates, files. A block that is not a call stays in the content as it was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from apcbatch.data.messages import Message, parse_object

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(slots=True)
class Answer:
    """The parts of an answer's text. tool_calls: in OpenAI's form, arguments as JSON text, ids from `call_1`."""

    content: str
    tool_calls: list[dict[str, Any]]

    def as_message(self) -> Message:
        """The answer as a message of the history, in the form that templates read: arguments as an object."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": orjson.loads(call["function"]["arguments"]),
                    },
                }
                for call in self.tool_calls
            ]
        return message


def parse_answer(text: str) -> Answer:
    """The content and the tool calls of an answer. Without calls the content is the whole text; with calls it is
    stripped."""
    kept: list[str] = []
    calls: list[dict[str, Any]] = []
    position = 0
    while (begin := text.find(_OPEN, position)) >= 0:
        end = text.find(_CLOSE, begin)
        if end < 0:
            break
        call = _parse_call(text[begin + len(_OPEN) : end], len(calls) + 1)
        after = end + len(_CLOSE)
        if call is None:
            kept.append(text[position:after])
        else:
            kept.append(text[position:begin])
            calls.append(call)
        position = after
    kept.append(text[position:])
    content = "".join(kept)
    return Answer(content.strip() if calls else content, calls)


def _parse_call(block: str, number: int) -> dict[str, Any] | None:
    """The call in a block: an object with a name and arguments (an object, or one as JSON text), or None."""
    value = parse_object(block)
    if value is None or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_object(arguments)
    if not isinstance(arguments, dict):
        return None
    try:
        function = {"name": value["name"], "arguments": orjson.dumps(arguments).decode()}
    except orjson.JSONEncodeError:  # nested deeper than it writes
        return None
    return {"id": f"call_{number}", "type": "function", "function": function}
