"""Conversation and BadLine, one of which each input line becomes, and how a parsed line becomes it.

Must not know: files, templates, tokens. Invariant: every JSON value becomes a Conversation or a BadLine, without an
exception.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from apcbatch.data.batch import check_batch
from apcbatch.data.checks import is_integer, shown, wrong
from apcbatch.data.fields import check_line
from apcbatch.data.messages import Message, Tool, check_messages, check_tools
from apcbatch.data.settings import check_settings, shown_tools
from apcbatch.data.sharegpt import check_sharegpt
from apcbatch.data.structure import given_structure
from apcbatch.errors import RequestError
from apcbatch.formats import Format, detect_format


@dataclass(slots=True)
class Conversation:
    """One checked input line.

    id: the line's own or `line-<n>`. line: counted from 1. messages: in the form of data/messages.py; empty for a
    completion, which has `prompt` instead (text or token ids). custom_id: set only for `batch` lines, which make
    exactly one request. params: the settings that the line (its body, for `batch`) gives; see Settings.
    model: the name that it gives, or None. columns: the line's keys that take no part in
    the answers. digest: xxh3-128, in hex, of the line as it was read.
    """

    id: str
    line: int
    messages: list[Message]
    tools: list[Tool] | None
    source_format: Format
    custom_id: str | None = None
    prompt: str | list[int] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    columns: tuple[str, ...] = ()
    digest: str = ""

    def request_id(self, turn: int) -> str:
        """A turn's custom_id: the line's own for `batch`, else `<conversation id>#<turn>`."""
        return self.custom_id if self.custom_id is not None else f"{self.id}#{turn}"


@dataclass(slots=True)
class BadLine:
    """One input line that cannot be answered. custom_id: of its (first) request, if the line tells it. digest: as for a
    Conversation. source_format: the line's format, if it has one."""

    line: int
    error: RequestError
    custom_id: str | None = None
    digest: str = ""
    source_format: Format | None = None


def parse_line(data: bytes, line: int, wanted: Format | None = None) -> Conversation | BadLine:
    """Parse one JSON line. wanted: its format; None decides by the keys."""
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg} at column {error.colno}"
        return BadLine(line, RequestError("invalid_json", message, line))
    return parse_record(record, line, wanted)


def parse_record(record: object, line: int, wanted: Format | None = None) -> Conversation | BadLine:
    """Check one parsed record. wanted: its format; None decides by the keys."""
    custom_id = source_format = None
    try:
        if not isinstance(record, dict):
            raise wrong("the line", record, "an object")
        source_format = _choose_format(record, wanted)
        custom_id = _first_request_id(record, line, source_format)
        columns = check_line(record, source_format)
        conversation = _READERS[source_format](record, line)
        conversation.columns = columns
        return conversation
    except RequestError as error:
        located = RequestError(error.code, error.message, line)
        return BadLine(line, located, custom_id, source_format=source_format)


def _choose_format(record: dict[str, Any], wanted: Format | None) -> Format:
    found = detect_format(record)
    if found is not None and wanted in (None, found):
        return found
    keys = ", ".join(shown(str(key)) for key in list(record)[:8]) or "none"
    expected = _KEYS[wanted] if wanted else '"messages", "custom_id" with "body", or "conversations"'
    kind = f"a line of the format {wanted}" if wanted else "the line"
    raise RequestError("invalid_request", f"{kind} needs {expected}; its keys are {keys}")


def _first_request_id(record: dict[str, Any], line: int, source_format: Format) -> str | None:
    """The custom_id that an error record of this line carries, as far as the line can tell."""
    if source_format == "batch":
        custom_id = record.get("custom_id")
        return custom_id if isinstance(custom_id, str) and custom_id else None
    try:
        return f"{_check_id(record, line)}#1"
    except RequestError:
        return f"line-{line}#1"


def _check_id(record: dict[str, Any], line: int) -> str:
    value = record.get("id")
    if value is None:
        return f"line-{line}"
    if is_integer(value):
        return str(value)
    if not isinstance(value, str) or not value:
        raise wrong("id", value, "a string that is not empty, or an integer")
    return value


def _read_messages(record: dict[str, Any], line: int) -> Conversation:
    messages = check_messages(record["messages"])
    return _conversation(record, line, messages, check_tools(record.get("tools")), "messages")


def _read_sharegpt(record: dict[str, Any], line: int) -> Conversation:
    messages, tools = check_sharegpt(record)
    return _conversation(record, line, messages, tools, "sharegpt")


def _conversation(
    record: dict[str, Any], line: int, messages: list[Message], tools: list[Tool] | None, source_format: Format
) -> Conversation:
    """A line that has its settings beside its messages."""
    settings = check_settings(record)
    tools = shown_tools(record, tools)
    settings.params.update(given_structure(record, tools))
    return Conversation(
        _check_id(record, line),
        line,
        messages,
        tools,
        source_format,
        params=settings.params,
        model=settings.model,
    )


def _read_batch(record: dict[str, Any], line: int) -> Conversation:
    body = check_batch(record)
    return Conversation(
        body.custom_id,
        line,
        body.messages,
        body.tools,
        "batch",
        body.custom_id,
        body.prompt,
        body.settings.params,
        body.settings.model,
    )


_READERS = {"messages": _read_messages, "batch": _read_batch, "sharegpt": _read_sharegpt}
_KEYS = {"messages": '"messages"', "batch": '"custom_id" and "body"', "sharegpt": '"conversations"'}
