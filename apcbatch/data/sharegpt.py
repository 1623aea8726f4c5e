"""Sharegpt records: speakers become roles, and the record becomes checked messages.

Must not know: lines, files, templates, tokens.
"""

from __future__ import annotations

from typing import Any

from apcbatch.data.checks import invalid, need_object, need_string, one_of, optional_string, shown, wrong
from apcbatch.data.messages import Message, Tool, Unread, parse_object
from apcbatch.data.tools import check_tools
from apcbatch.formats import SPEAKERS

_MAIN_SPEAKERS = ("human", "gpt", "system", "tool")


def check_sharegpt(record: dict[str, Any], unread: Unread) -> tuple[list[Message], list[Tool] | None]:
    """The (messages, tools) of a record with `conversations`; RequestError for anything malformed.

    The record may also have `system`, a text, and `tools`. unread: is told of the keys
    of messages that are not read.
    """
    value = record["conversations"]
    if not isinstance(value, list):
        raise wrong("conversations", value, "a list of objects with from and value")
    if not value:
        raise invalid("conversations is empty; expected at least one message")
    messages = [_check_spoken(item, f"conversations[{index}]", unread) for index, item in enumerate(value)]
    system = optional_string(record, "system", "system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages, check_tools(record.get("tools"), unread=unread)


def _check_spoken(value: object, where: str, unread: Unread) -> Message:
    record = need_object(value, where, "an object with from and value")
    unread.note(record, "spoken", where)
    speaker = need_string(record, "from", f"{where}.from", one_of(_MAIN_SPEAKERS))
    if speaker not in SPEAKERS:
        raise invalid(f"{where}.from is {shown(speaker)}; expected {one_of(_MAIN_SPEAKERS)}")
    text = need_string(record, "value", f"{where}.value")
    if speaker == "function_call":
        call = parse_object(text)
        if call is not None and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict):
            function = {"name": call["name"], "arguments": call["arguments"]}
            return {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": function}],
            }
        unread.say(f"{where}.value is no tool call, an object with name and arguments; it is given as a text")
    return {"role": SPEAKERS[speaker], "content": text}
