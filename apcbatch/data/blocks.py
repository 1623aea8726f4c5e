"""Messages as Anthropic and Inspect have them: lists of typed blocks become texts, tool calls and messages of tools.

Must not know: lines, files, templates, tokens. Invariant: the order of what was said stays.
"""

from __future__ import annotations

from typing import Any

BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "reasoning"})
_THOUGHTS = {"thinking": "thinking", "reasoning": "reasoning"}  # block -> its key that holds the text


def has_blocks(message: Any) -> bool:
    """Whether a message holds blocks that OpenAI's messages have in places of their own."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(_kind(block) in BLOCKS for block in content)


def _kind(block: Any) -> str:
    """The type of a block; empty where it is not text, or what has it is no block."""
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else ""


def without_blocks(message: dict[str, Any], where: str) -> list[tuple[dict[str, Any], str]]:
    """The same as OpenAI's messages, each with its place: the results of tools are messages of their own, in order."""
    found: list[tuple[dict[str, Any], str]] = []
    rest = {key: value for key, value in message.items() if key != "content"}
    parts: list[Any] = []
    calls, thoughts = [], []

    def add_parts() -> None:
        if parts:
            found.append(({**rest, "content": list(parts)}, where))
            parts.clear()

    for index, block in enumerate(message["content"]):
        kind = _kind(block)
        if kind == "tool_result" and message.get("role") == "user":
            add_parts()
            content = block.get("content")
            answer = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content or ""}
            if block.get("is_error"):
                answer["is_error"] = True  # which no template reads: it is named
            found.append((answer, f"{where}.content[{index}]"))
        elif kind == "tool_use" and message.get("role") == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind in _THOUGHTS and isinstance(block.get(_THOUGHTS[kind]), str):
            thoughts.append(block[_THOUGHTS[kind]])
        elif kind == "redacted_thinking":
            rest["redacted_thinking"] = True
        else:
            parts.append(block)
    if message.get("role") != "assistant":
        add_parts()
        return found or [({**rest, "content": ""}, where)]
    own = {**rest, "content": parts}
    if calls:
        own["tool_calls"] = [*(message.get("tool_calls") or ()), *calls]
    if thoughts:
        own.setdefault("reasoning_content", "".join(thoughts))
    return [(own, where)]
