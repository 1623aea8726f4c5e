"""Script: one conversation while it is being written.

Every tool result follows the assistant message that asked for it and carries the id of its call.
Must not know: what the conversation is about.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

Message = dict[str, Any]
Call = tuple[str, dict[str, Any], Any]  # the function's name, its arguments, what it returns
MAX_MESSAGES = 20


def to_json(value: Any) -> str:
    """Compact JSON, keys in the order given."""
    return json.dumps(value, ensure_ascii=False)


def function(name: str, description: str, required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """A tool in the OpenAI shape; each parameter is its JSON schema, or a description of a string."""
    properties = {
        key: {"type": "string", "description": schema} if isinstance(schema, str) else schema
        for key, schema in {**required, **optional}.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


class Script:
    """Messages in the order they are said; `fork` starts another conversation from the same beginning."""

    def __init__(self, name: str, system: str, tools: list[dict[str, Any]]) -> None:
        self.name = name
        self.tools = tools
        self.messages: list[Message] = [{"role": "system", "content": system}]

    def fork(self, name: str) -> Script:
        """A conversation that has said the same so far."""
        other = Script(name, "", self.tools)
        other.messages = list(self.messages)
        return other

    def call_id(self, called: dict[str, str], index: int) -> str:
        """An id that follows from what was said so far: the same in every fork up to where they part."""
        said = to_json([self.messages, called, index]).encode()
        return f"call_{hashlib.sha256(said).hexdigest()[:10]}"

    def user(self, text: str) -> None:
        """The user says text."""
        self.messages.append({"role": "user", "content": text})

    def say(self, text: str) -> None:
        """The assistant says text and calls nothing."""
        self.messages.append({"role": "assistant", "content": text})

    def call(self, text: str | None, *calls: Call) -> None:
        """The assistant calls functions, with a remark or without, and each of them answers."""
        requests: list[Message] = []
        results: list[Message] = []
        for name, arguments, returned in calls:
            called = {"name": name, "arguments": to_json(arguments)}
            call_id = self.call_id(called, len(requests))
            requests.append({"id": call_id, "type": "function", "function": called})
            content = returned if isinstance(returned, str) else to_json(returned)
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
        self.messages.append({"role": "assistant", "content": text, "tool_calls": requests})
        self.messages.extend(results)

    def drop_answer(self) -> None:
        """Leave the last answer out, so that the conversation ends with the message it would answer."""
        while self.messages[-1]["role"] == "assistant":
            self.messages.pop()

    def record(self) -> dict[str, Any]:
        """The line of the file."""
        return {"id": self.name, "messages": self.messages, "tools": self.tools}
