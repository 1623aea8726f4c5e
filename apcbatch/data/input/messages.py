"""Check messages and convert them to the one form that chat templates read.

In that form a message has `role` and `content` (always a string; of several text parts, Parts). It has `name`,
`tool_calls`, `tool_call_id`, `reasoning_content` and `refusal` if they were given. The arguments of a tool call are an
object if they can be parsed as one. Content blocks of Anthropic's messages (`tool_use`, `tool_result`, `thinking`)
become OpenAI's fields and messages.
"""

from __future__ import annotations

from typing import Any

from apcbatch.answer import AnswerWarning, WarningKind
from apcbatch.data.checks import (
    invalid,
    missing,
    need_object,
    need_string,
    one_of,
    optional_string,
    required,
    shown,
    wrong,
)
from apcbatch.data.conversation import Message, Parts
from apcbatch.data.fields import Shape, unread_keys
from apcbatch.data.json_text import read_json
from apcbatch.formats import ROLE_ALIASES, ROLES

MOST_WARNINGS = 8
_REASONING = ("reasoning", "thinking")  # other names of a message's `reasoning_content`
_TEXTS = ("name", "tool_call_id", "reasoning_content", "refusal")  # optional fields, each a string


class ContentWarnings:
    """Warnings about the messages and tools of one line: unread keys, each named once, and other sentences."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}  # key -> where it was first seen
        self._sentences: dict[str, AnswerWarning] = {}

    def note_keys(self, record: Message, shape: Shape, where: str) -> None:
        """Note the unread keys of an object of this shape. where: its place, as in `messages[2]`."""
        for name in unread_keys(record, shape):
            self.note_key(name, where)

    def note_key(self, name: str, where: str) -> None:
        """Note one unread key and the place where it stands."""
        if len(self._keys) <= MOST_WARNINGS:
            self._keys.setdefault(name, where)

    def add(self, kind: WarningKind, sentence: str) -> None:
        """Add a sentence, unless an earlier one differs from it only in the first word, the place."""
        self._sentences.setdefault(sentence.partition(" ")[2], AnswerWarning(kind, sentence))

    def sentences(self) -> tuple[AnswerWarning, ...]:
        """Return the warnings: first one sentence about all unread keys, if any, then up to MOST_WARNINGS others."""
        added = tuple(self._sentences.values())[:MOST_WARNINGS]
        if not self._keys:
            return added
        first = list(self._keys.items())[:MOST_WARNINGS]
        names = ", ".join(f"{shown(name)} (first in {where})" for name, where in first)
        more = ", and further ones" if len(self._keys) > MOST_WARNINGS else ""
        return (AnswerWarning("unread_keys", f"keys that are not read: {names}{more}"), *added)


def check_messages(value: object, where: str = "messages", warnings: ContentWarnings | None = None) -> list[Message]:
    """Check a list of at least one message; return the converted messages. RequestError for any other value."""
    warnings = ContentWarnings() if warnings is None else warnings
    messages: list[Message] = []
    unanswered, ids = 0, set[str]()  # calls that no result has answered by its position; ids of all calls so far
    for index, message in enumerate(need_messages(value, where, "a list of messages")):
        place = f"{where}[{index}]"
        message = _in_newer_form(message, place)
        for one, at in _without_blocks(message, place) if _has_blocks(message) else [(message, place)]:
            checked = _check_message(one, at, warnings)
            messages.append(checked)
            calls = checked.get("tool_calls", [])
            ids |= {call["id"] for call in calls if "id" in call}
            if checked["role"] == "tool":
                answered_id = checked.get("tool_call_id")
                if answered_id not in ids if answered_id is not None and ids else unanswered <= 0:
                    warnings.add("tool_results", f"{at} is a tool's result without a tool call before it")
                unanswered -= 1
            elif checked["role"] == "assistant":
                unanswered = len(calls)
    return messages


def need_messages(value: object, where: str, expected: str) -> list[Any]:
    """Return the value if it is a list of at least one item; RequestError otherwise."""
    if not isinstance(value, list):
        raise wrong(where, value, expected)
    if not value:
        raise invalid(f"{where} is empty; expected at least one message")
    return value


def _in_newer_form(message: Any, where: str) -> Any:
    """Move `text` to an absent `content`, and the older `function_call` to `tool_calls`."""
    if not isinstance(message, dict):
        return message
    call = message.get("function_call")
    if call is not None:
        if message.get("tool_calls"):
            raise invalid(f"{where}.function_call is the older form of tool_calls, which stand beside it; give one")
        rest = {key: one for key, one in message.items() if key != "function_call"}
        message = {**rest, "tool_calls": [{"type": "function", "function": call}]}
    if "content" not in message and isinstance(message.get("text"), (str, list)):
        message = {"content" if key == "text" else key: one for key, one in message.items()}
    return message


def _check_message(value: object, where: str, warnings: ContentWarnings) -> Message:
    record = need_object(value, where, "a message: an object with role and content")
    warnings.note_keys(record, "message", where)
    role = need_string(record, "role", f"{where}.role", one_of(ROLES))
    if role not in ROLE_ALIASES:
        raise wrong(f"{where}.role", role, one_of(ROLES))
    role = ROLE_ALIASES[role]
    calls = _check_calls(record, role, where, warnings)
    message: Message = {"role": role, "content": _check_content(record, role, bool(calls), where, warnings)}
    if calls:
        message["tool_calls"] = calls
    for key in _TEXTS:
        if record.get(key) is not None:
            message[key] = optional_string(record, key, f"{where}.{key}")
    if message.get("refusal") and record.get("content") is not None:
        warnings.add("changed_content", f"{where}.refusal stands beside content; the template is given both")
    for key in _REASONING:
        if isinstance(record.get(key), str):
            message.setdefault("reasoning_content", record[key])
        elif record.get(key):
            warnings.note_key(key, where)
    return message


def _check_content(record: Message, role: str, has_calls: bool, where: str, warnings: ContentWarnings) -> str:
    """Return the content as one string; several text parts are Parts.

    The content may be null or absent in a message with tool calls. In any other message of the assistant it may be
    null, or absent beside a refusal."""
    content = record.get("content")
    where_content = f"{where}.content"
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [_check_part(part, f"{where_content}[{index}]", warnings) for index, part in enumerate(content)]
        return Parts(parts) if len(parts) > 1 else "".join(parts)
    if content is not None:
        raise wrong(where_content, content, "a string or a list of text parts")
    if has_calls:
        return ""
    if role == "assistant" and ("content" in record or isinstance(record.get("refusal"), str)):
        refusal = "; the template is given its refusal" if record.get("refusal") else ""
        warnings.add("changed_content", f"{where_content} is null: rendered as an empty text{refusal}")
        return ""
    expected = "a string or a list of text parts"
    if role == "assistant":
        expected = "a string, a list of text parts, or tool_calls beside it"
    raise wrong(where_content, None, expected) if "content" in record else missing(where_content, expected)


def _check_part(value: object, where: str, warnings: ContentWarnings) -> str:
    part = need_object(value, where, "a text part: an object with type and text")
    warnings.note_keys(part, "part", where)
    kind = need_string(part, "type", f"{where}.type", '"text"')
    if kind != "text":
        raise invalid(f'{where}.type is {shown(kind)}; expected "text": only text can be read')
    if "text" in part:
        if part.get("value") is not None:
            warnings.note_key("value", where)
    elif "value" in part:
        return need_string(part, "value", f"{where}.value")
    return need_string(part, "text", f"{where}.text")


def _check_calls(record: Message, role: str, where: str, warnings: ContentWarnings) -> list[dict[str, Any]]:
    """Check the tool calls of a message; return an empty list without any. RequestError for calls of another role than
    the assistant."""
    calls = record.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", calls, "a list of tool calls")
    if calls and role != "assistant":
        raise invalid(f"{where}.tool_calls stands in a message of the role {role}; only an assistant calls tools")
    return [_check_call(call, f"{where}.tool_calls[{index}]", warnings) for index, call in enumerate(calls)]


def _check_call(value: object, where: str, warnings: ContentWarnings) -> dict[str, Any]:
    record = need_object(value, where, "a tool call: an object with id, type and function")
    if isinstance(record.get("function"), str) and "arguments" in record:
        # Inspect's form: `function` is the name, and `arguments` stands beside it.
        function = {"name": record["function"], "arguments": record["arguments"]}
        record = {**record, "function": function, "arguments": None}
    elif "function" not in record and "name" in record:  # flat: `name` and `arguments` beside `id`
        rest = {key: one for key, one in record.items() if key not in ("name", "arguments")}
        record = {**rest, "function": {"name": record["name"], "arguments": record.get("arguments")}}
    warnings.note_keys(record, "call", where)
    call_id = optional_string(record, "id", f"{where}.id")
    kind = optional_string(record, "type", f"{where}.type")
    if kind not in (None, "function"):
        raise wrong(f"{where}.type", kind, '"function"')
    expected, at = "an object with name and arguments", f"{where}.function"
    function = need_object(required(record, "function", at, expected), at, expected)
    warnings.note_keys(function, "function", at)
    name = need_string(function, "name", f"{at}.name")
    arguments = _check_arguments(function.get("arguments"), f"{at}.arguments")
    if isinstance(arguments, str):
        sentence = f"{at}.arguments is no JSON text of an object; the template is given the text as it is"
        warnings.add("changed_content", sentence)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def _check_arguments(value: object, where: str) -> dict[str, Any] | str:
    """Return the arguments of a call as an object, also if they came as JSON text. Other text stays unchanged; a blank
    one is no arguments."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        parsed = parse_object(value)
        return value if parsed is None else parsed
    return need_object(value, where, "an object, or an object as JSON text")


def parse_object(text: str) -> dict[str, Any] | None:
    """Parse a text as a JSON object; None if it is anything else."""
    try:
        value = read_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "reasoning"})
_THOUGHTS = ("thinking", "reasoning")  # block types whose text is under a key of the same name


def _has_blocks(message: Any) -> bool:
    """Return whether the content of a message has blocks that are separate fields in OpenAI's messages."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(_block_type(block) in _BLOCKS for block in content)


def _block_type(block: Any) -> str:
    """Return the type of a content block; empty if it has none."""
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else ""


def _without_blocks(message: dict[str, Any], where: str) -> list[tuple[dict[str, Any], str]]:
    """Convert a message with blocks to OpenAI's messages, each with its place in the line.

    A `tool_result` becomes a message of the role `tool`. Text before it becomes a message before it."""
    role = message.get("role")
    found: list[tuple[dict[str, Any], str]] = []
    rest = {key: value for key, value in message.items() if key != "content"}
    parts: list[Any] = []
    calls, thoughts = [], []
    for index, block in enumerate(message["content"]):
        kind = _block_type(block)
        if kind == "tool_result" and role == "user":
            if parts:
                found.append(({**rest, "content": parts}, where))
                parts = []
            found.append((_tool_message(block), f"{where}.content[{index}]"))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind in _THOUGHTS and isinstance(block.get(kind), str):
            thoughts.append(block[kind])
        elif kind == "redacted_thinking":
            rest["redacted_thinking"] = True
        else:
            parts.append(block)
    if parts or not found:
        found.append(({**rest, "content": parts or ""}, where))
    if calls:
        found[0][0]["tool_calls"] = [*(message.get("tool_calls") or ()), *calls]
    if thoughts and role == "assistant":
        found[0][0].setdefault("reasoning_content", "".join(thoughts))
    return found


def _tool_message(block: dict[str, Any]) -> dict[str, Any]:
    """Convert a `tool_result` block to a message of the role `tool`."""
    answer = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content") or ""}
    if block.get("is_error"):
        answer["is_error"] = True  # kept, so that a warning names this key, which no template reads
    return answer
