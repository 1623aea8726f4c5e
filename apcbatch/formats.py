"""The closed sets of what may come in: input formats, ways of taking turns, roles, urls; the bounds of stop texts.

Must not know: files, templates, tokens. Every function is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Format = Literal["messages", "batch", "sharegpt"]
FORMATS: tuple[str, ...] = get_args(Format)
FORMAT_CHOICES: tuple[str, ...] = ("auto", *FORMATS)

Turns = Literal["each", "last", "rollout"]
TURNS: tuple[str, ...] = get_args(Turns)

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)
# `developer` is the newer name of the system role.
ROLE_ALIASES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# Who speaks in a sharegpt record. `function_call` is an assistant message whose value is the call as JSON.
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

# The parsers of apcbatch/data/tool_parsers/ and apcbatch/data/reasoning.py, for the options that name them.
TOOL_PARSERS: tuple[str, ...] = ("granite", "hermes", "jamba", "llama3", "mistral", "nemotron", "qwen-coder")
REASONING_PARSERS: tuple[str, ...] = ("think", "mistral", "granite")

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

MOST_TEMPERATURE = 2  # as OpenAI's API has it
MOST_STOP_TEXTS = 64
LONGEST_STOP_TEXT = 1024  # characters


def detect_format(record: Mapping[str, object]) -> Format | None:
    """The format that a record's keys tell, or None where they tell none."""
    if "messages" in record:
        return "messages"
    if "body" in record or ("custom_id" in record and "url" in record):
        return "batch"
    if "conversations" in record:
        return "sharegpt"
    return None
