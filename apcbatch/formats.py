"""The closed sets of input: formats, modes of turns, roles, parsers, URLs.

Every function is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Format = Literal["messages", "batch", "sharegpt"]
FORMATS: tuple[str, ...] = get_args(Format)
FORMAT_CHOICES: tuple[str, ...] = ("auto", *FORMATS)
# The key of a line's content, and the smallest valid content by key; a body has `messages` or `prompt`.
CONTENT_KEYS: Mapping[Format, str] = {"messages": "messages", "batch": "body", "sharegpt": "conversations"}
VALID_CONTENT: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "conversations": [{"from": "human", "value": "a"}],
    "prompt": "a",
}

Turns = Literal["each", "last", "rollout", "live"]
TURNS: tuple[str, ...] = get_args(Turns)

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)
# `developer` is the newer name of the system role, `function` the older one of the tool's.
ROLE_ALIASES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
# Speaker in a sharegpt record -> role. `function_call` is an assistant message whose value is the call as JSON.
SPEAKERS: Mapping[str, Role] = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "tool": "tool",
    "user": "user",
    "assistant": "assistant",
    **dict.fromkeys(("chatgpt", "chatbot", "bot", "model", "ai", "bing", "bard", "claude"), "assistant"),
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}

# The parsers of data/output/tool_parsers/ and data/output/reasoning.py, for the options that name them.
TOOL_PARSERS: tuple[str, ...] = ("granite", "hermes", "jamba", "lfm2", "llama3", "mistral", "nemotron", "qwen-coder")
REASONING_PARSERS: tuple[str, ...] = ("think", "mistral", "granite")

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"


def detect_format(record: Mapping[str, object]) -> Format | None:
    """Return the format of a record, recognised by its keys; None if they fit none."""
    if "messages" in record:
        return "messages"
    if "body" in record or ("custom_id" in record and "url" in record):
        return "batch"
    if "conversations" in record:
        return "sharegpt"
    return None
