"""Name the format of a line that cannot be read, and say how to convert it.

Invariant: no advice leads to another prompt than the user's. A column is proposed only by its usual name, never by its
length, and not beside a column that may be a part of the prompt.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from apcbatch.data.checks import shown
from apcbatch.data.input.layouts import has_layout, is_conversation, parsed_messages
from apcbatch.formats import detect_format


class KnownFormat(NamedTuple):
    """A format that is named in errors. way: how to convert it. shapes: alternatives, each a list of paths that a line
    of this format has. A path is `request.contents[].parts`, for example; `[]` is the first item of a list."""

    name: str
    way: str
    shapes: tuple[tuple[str, ...], ...]


_GEMINI_MESSAGE = (
    '{role: (if .role == "model" then "assistant" else "user" end), content: ([.parts[].text] | join(""))}'
)
KNOWN_FORMATS = (
    KnownFormat(
        "an answer of a batch",
        "INPUT is the file of its requests, which has the same custom_id",
        (("custom_id", "response"), ("custom_id", "error"), ("custom_id", "result"), ("choices[].message",),
         ("choices[].text",)),
    ),
    KnownFormat(
        "a request of Gemini",
        'write its "contents" as "messages", and systemInstruction as a system message before them; for texts alone '
        f"jq -c '{{messages: [(.request // .).contents[] | {_GEMINI_MESSAGE}]}}' does the former",
        (("contents[].parts",), ("request.contents",)),
    ),
    KnownFormat(
        "a request of Bedrock",
        "for a model of Anthropic write it as jq -c '{custom_id: .recordId, params: (.modelInput | "
        "del(.anthropic_version))}' does; otherwise write its \"messages\"",
        (("modelInput",),),
    ),
    KnownFormat(
        "a request of OpenAI's Responses API",
        'write its "input" as "messages", its "instructions" as a system message before them, and the url of a batch '
        "line as /v1/chat/completions",
        (("body.input",), ("input", "instructions"), ("input", "model")),
    ),
    KnownFormat(
        "a trajectory in ATIF",
        'write its "steps" as "messages": "source" as the role (agent is assistant), "message" as the content, '
        '"tool_calls" as such, and each result of "observation" as a message of the role tool',
        (("steps[].source",), ("steps[].step_id",)),
    ),
    KnownFormat(
        "an event in the session of a coding agent",
        'write the messages of a session as one line {"messages": [...]}; where each event has a "message", '
        "jq -cs '{messages: [.[].message | select(.role?)]}' does",
        (("sessionId",), ("leafUuid",), ("type", "payload"), ("type", "message.role"), ("type", "snapshot"),
         ("type", "cwd")),
    ),
    KnownFormat(
        "a tree of oasst, or a message of one",
        'write each path from a prompt to a reply as one line {"messages": [...]}; prompter is the role user',
        (("message_tree_id",), ("prompt.replies",)),
    ),
    KnownFormat(
        "one message",
        "write the messages of a conversation as one line, as jq -cs '{messages: .}' does with a file of one "
        "conversation",
        (("role", "content"), ("role", "text"), ("role", "parts"), ("role", "tool_calls")),
    ),
    KnownFormat(
        "one message",
        "write the messages of a conversation as one line, as jq -cs '{conversations: .}' does with a file of one "
        "conversation",
        (("from", "value"),),
    ),
    KnownFormat(
        "a preference pair",
        'give its prompt as "prompt"; if "chosen" is a list of messages, --messages-column chosen reads that list',
        (("chosen", "rejected"),),
    ),
    KnownFormat(
        "an instruction in the format of Alpaca or Dolly",
        "the user's text is its instruction and its input or context: write both as \"prompt\", as jq -c '. + {prompt: "
        '([.instruction, .input // .context] | map(select((. // "") != "")) | join("\\n\\n"))}\' does',
        (("instruction", "output"), ("instruction", "response"), ("instruction", "input")),
    ),
)  # fmt: skip

# Usual names of a column with the user's text, and of columns that may belong to the prompt beside it.
_PROMPTS = (
    "question", "query", "instruction", "problem", "problem_statement", "text", "user", "task", "inputs", "goal",
)  # fmt: skip
_BESIDE = {
    "choices", "code", "content", "context", "document", "facts", "history", "input", "options", "passage", "paragraph",
    "persona", "starter_code", "support", "system", "system_message", "system_prompt", "tools",
}  # fmt: skip
_RENDERED = re.compile(
    r"<\|\w+\|>|\[INST\]|<start_of_turn>|^\W*(human|user|assistant|instruction|response)\W*:", re.I | re.M
)


def remedy(record: Mapping[str, Any]) -> str:
    """Return advice about a line of unknown layout, as the end of a sentence; empty if there is none."""
    for name, value in record.items():
        if is_conversation(parsed_messages(value)):
            return f'; rename {shown(name)} to "messages", or give --messages-column {shlex.quote(name)}'
    for name, value in record.items():
        if isinstance(value, dict) and detect_format(value) is not None:
            return f"; its request is in {shown(name)}: write that as the line, as jq -c {_path(name)} does"
        if isinstance(value, list) and value and isinstance(value[0], dict) and has_layout(value[0]):
            return f"; its records are in {shown(name)}: write them one a line, as jq -c {_path(name, '[]')} does"
    names = [name for name in _PROMPTS if isinstance(record.get(name), str)]
    if len(names) == 1 and not _BESIDE & record.keys() - {*names} and not _RENDERED.search(record[names[0]]):
        return f"; if {shown(names[0])} is what the user says, give --prompt-column {names[0]}"
    if any(isinstance(value, str) for value in record.values()):
        return "; if one of them is all that the user says, give --prompt-column with its name"
    return ""


def known_format(record: Mapping[str, Any]) -> str:
    """Return the name of a line's format with the way to convert it; empty for an unknown one."""
    for name, way, shapes in KNOWN_FORMATS:
        if any(all(_at(record, path) is not None for path in shape) for shape in shapes):
            return f"{name}: {way}"
    return ""


def _at(value: Any, path: str) -> Any:
    """Return the value at a path of a record; None if there is none."""
    for key in path.split("."):
        name = key.removesuffix("[]")
        value = value.get(name) if isinstance(value, Mapping) else None
        if name != key:
            value = value[0] if isinstance(value, list) and value else None
    return value


def _path(name: str, suffix: str = "") -> str:
    """Return the argument of jq that selects a key."""
    key = f".{name}" if name.isidentifier() else f".[{shown(name)}]"
    return shlex.quote(key + suffix)
