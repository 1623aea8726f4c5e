"""Messages: checked, and brought into the one form that chat templates read.

Must not know: lines, files, templates, tokens. In that form a message has `role` and `content` (always a string) and,
if they were given, `name`, `tool_calls`, `tool_call_id`, `reasoning_content` and `refusal`. The arguments of a tool
call are an object if they can be read as one.
"""

from __future__ import annotations

from typing import Any

from apcbatch.data.blocks import has_blocks, without_blocks
from apcbatch.data.checks import (
    invalid,
    missing,
    need_object,
    need_string,
    one_of,
    optional_string,
    shown,
    wrong,
)
from apcbatch.data.fields import Shape, unread_keys
from apcbatch.data.json_text import read_json
from apcbatch.formats import ROLE_ALIASES, ROLES

MOST_NAMES = 8
# Other names of a message's `reasoning_content`.
_REASONING = ("reasoning", "thinking")
_TEXTS = ("name", "tool_call_id", "reasoning_content", "refusal")

Message = dict[str, Any]
Tool = dict[str, Any]


class Unread:
    """The keys that messages have and nobody reads, each once."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._sentences: dict[str, str] = {}

    def note(self, record: Message, shape: Shape, where: str) -> None:
        """Take the keys of one object."""
        for name in unread_keys(record, shape):
            self.add(name, where)

    def add(self, name: str, where: str) -> None:
        """Take one key."""
        if len(self._places) <= MOST_NAMES:
            self._places.setdefault(name, where)

    def say(self, sentence: str) -> None:
        """Warn of something else; of sentences that differ in their first word alone, the place, the first is kept."""
        self._sentences.setdefault(sentence.partition(" ")[2], sentence)

    def warnings(self) -> tuple[str, ...]:
        """A sentence about the keys, and what `say` was told; none if there is nothing."""
        said = tuple(self._sentences.values())[:MOST_NAMES]
        if not self._places:
            return said
        shown_places = list(self._places.items())[:MOST_NAMES]
        names = ", ".join(f"{shown(name)} (first in {where})" for name, where in shown_places)
        more = ", and further ones" if len(self._places) > MOST_NAMES else ""
        return (f"keys that are not read: {names}{more}", *said)


def check_messages(value: object, where: str = "messages", unread: Unread | None = None) -> list[Message]:
    """A list of at least one message, each in its checked form; raises RequestError for anything else.

    unread: is told of the keys that are not read.
    """
    if not isinstance(value, list):
        raise wrong(where, value, "a list of messages")
    if not value:
        raise invalid(f"{where} is empty; expected at least one message")
    unread = Unread() if unread is None else unread
    messages: list[Message] = []
    for index, message in enumerate(value):
        place = f"{where}[{index}]"
        if has_blocks(message):
            messages += [check_message(one, at, unread) for one, at in without_blocks(message, place)]
        else:
            messages.append(check_message(message, place, unread))
    return messages


def check_message(value: object, where: str, unread: Unread) -> Message:
    """One message in its checked form."""
    record = need_object(value, where, "a message: an object with role and content")
    unread.note(record, "message", where)
    role = check_role(record, where)
    message: Message = {"role": role}
    calls = check_tool_calls(record, role, where, unread)
    message["content"] = check_content(record, role, bool(calls), where, unread)
    if calls:
        message["tool_calls"] = calls
    for key in _TEXTS:
        text = optional_string(record, key, f"{where}.{key}")
        if text is not None:
            message[key] = text
    if message.get("refusal") and record.get("content") is not None:
        unread.say(f"{where}.refusal stands beside content; the template is given both")
    for key in _REASONING:
        if isinstance(record.get(key), str):
            message.setdefault("reasoning_content", record[key])
        elif record.get(key):
            unread.add(key, where)
    if record.get("function_call") is not None:
        raise invalid(f"{where}.function_call is the old form of a tool call; give it as tool_calls")
    return message


def check_role(record: Message, where: str) -> str:
    """The role; `developer` becomes `system`."""
    role = need_string(record, "role", f"{where}.role", one_of(ROLES))
    if role not in ROLE_ALIASES:
        raise wrong(f"{where}.role", role, one_of(ROLES))
    return ROLE_ALIASES[role]


def check_content(record: Message, role: str, has_calls: bool, where: str, unread: Unread) -> str:
    """The content as one string: text parts are joined. Only beside tool calls it may be absent."""
    content = record.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_check_part(part, f"{where}.content[{index}]", unread) for index, part in enumerate(content))
    if content is not None:
        raise wrong(f"{where}.content", content, "a string or a list of text parts")
    if has_calls:
        return ""
    if role == "assistant" and ("content" in record or isinstance(record.get("refusal"), str)):
        unread.say(
            f"{where}.content is null: rendered as an empty text"
            + "; the template is given its refusal" * bool(record.get("refusal"))
        )
        return ""
    if role == "assistant":
        expected = "a string, a list of text parts, or tool_calls beside it"
    else:
        expected = "a string or a list of text parts"
    raise (
        missing(f"{where}.content", expected) if "content" not in record else wrong(f"{where}.content", None, expected)
    )


def _check_part(value: object, where: str, unread: Unread) -> str:
    part = need_object(value, where, "a text part: an object with type and text")
    unread.note(part, "part", where)
    kind = need_string(part, "type", f"{where}.type", '"text"')
    if kind != "text":
        raise invalid(f'{where}.type is {shown(kind)}; expected "text": only text can be read')
    return need_string(part, "text", f"{where}.text")


def check_tool_calls(record: Message, role: str, where: str, unread: Unread) -> list[dict[str, Any]]:
    """The tool calls of a message, or an empty list. Only an assistant may make them."""
    calls = record.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", calls, "a list of tool calls")
    if calls and role != "assistant":
        raise invalid(f"{where}.tool_calls stands in a message of the role {role}; only an assistant calls tools")
    return [_check_call(call, f"{where}.tool_calls[{index}]", unread) for index, call in enumerate(calls)]


def _check_call(value: object, where: str, unread: Unread) -> dict[str, Any]:
    record = need_object(value, where, "a tool call: an object with id, type and function")
    if (
        isinstance(record.get("function"), str) and "arguments" in record
    ):  # Inspect's: the name, with the arguments beside it
        function = {"name": record["function"], "arguments": record["arguments"]}
        record = {**record, "function": function, "arguments": None}
    unread.note(record, "call", where)
    call: dict[str, Any] = {}
    call_id = optional_string(record, "id", f"{where}.id")
    if call_id is not None:
        call["id"] = call_id
    kind = optional_string(record, "type", f"{where}.type")
    if kind not in (None, "function"):
        raise wrong(f"{where}.type", kind, '"function"')
    if "function" not in record:
        raise missing(f"{where}.function", "an object with name and arguments")
    function = need_object(record["function"], f"{where}.function", "an object with name and arguments")
    unread.note(function, "function", f"{where}.function")
    name = need_string(function, "name", f"{where}.function.name")
    arguments = check_arguments(function.get("arguments"), f"{where}.function.arguments")
    if isinstance(arguments, str):
        unread.say(f"{where}.function.arguments is no JSON text of an object; the template is given the text as it is")
    return {**call, "type": "function", "function": {"name": name, "arguments": arguments}}


def check_arguments(value: object, where: str) -> dict[str, Any] | str:
    """The arguments of a call: an object, even if it came as JSON text. Other text is kept as it is."""
    if value is None:
        return {}
    if isinstance(value, str):
        parsed = parse_object(value)
        return value if parsed is None else parsed
    return need_object(value, where, "an object, or an object as JSON text")


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text holds, or None."""
    try:
        value = read_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
