"""Check the messages of a sharegpt record, and map its speakers to roles."""

from __future__ import annotations

from typing import Any

from apcbatch.data.checks import need_object, need_string, one_of, optional_string, wrong
from apcbatch.data.conversation import Message
from apcbatch.data.input.messages import ContentWarnings, need_messages, parse_object
from apcbatch.formats import SPEAKERS

_MAIN_SPEAKERS = ("human", "gpt", "system", "tool")


def check_sharegpt(record: dict[str, Any], warnings: ContentWarnings) -> list[Message]:
    """Convert the messages of a record with `conversations` and, if present, a text under `system`.

    RequestError for an invalid value."""
    spoken = need_messages(record["conversations"], "conversations", "a list of objects with from and value")
    messages = [_check_spoken(item, f"conversations[{index}]", warnings) for index, item in enumerate(spoken)]
    system = optional_string(record, "system", "system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _check_spoken(value: object, where: str, warnings: ContentWarnings) -> Message:
    record = need_object(value, where, "an object with from and value")
    warnings.note_keys(record, "spoken", where)
    speaker = need_string(record, "from", f"{where}.from", one_of(_MAIN_SPEAKERS))
    if speaker not in SPEAKERS:
        raise wrong(f"{where}.from", speaker, one_of(_MAIN_SPEAKERS))
    text = need_string(record, "value", f"{where}.value")
    if speaker == "function_call":
        call = parse_object(text)
        if call is not None and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict):
            function = {"name": call["name"], "arguments": call["arguments"]}
            return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        sentence = f"{where}.value is no tool call, an object with name and arguments; it is given as a text"
        warnings.add("changed_content", sentence)
    return {"role": SPEAKERS[speaker], "content": text}
