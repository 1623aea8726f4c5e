"""Conversation and BadLine, one of which each input line becomes, and how a parsed line becomes it.

Must not know: files, templates, tokens. Invariant: every JSON value becomes a Conversation or a BadLine, without an
exception.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from json import JSONDecodeError
from typing import Any

from apcbatch.data.batch import check_batch
from apcbatch.data.checks import invalid, is_integer, shown, wrong
from apcbatch.data.fields import check_line
from apcbatch.data.json_text import read_json
from apcbatch.data.layouts import ANY_LINE, LaidOut, LineOptions, has_layout, lay_out, remedy
from apcbatch.data.messages import Message, Tool, Unread, check_messages
from apcbatch.data.nulls import settle_line
from apcbatch.data.settings import Settings, check_settings, shown_tools
from apcbatch.data.sharegpt import check_sharegpt
from apcbatch.data.structure import given_structure
from apcbatch.data.switches import Switches
from apcbatch.data.tools import check_tools
from apcbatch.data.turns import Turn, choose_turns
from apcbatch.errors import RequestError
from apcbatch.formats import Format, Turns, detect_format


@dataclass(slots=True)
class Conversation:
    """One checked input line.

    id: the line's own or `line-<n>`. line: counted from 1. messages: in the form of data/messages.py; empty for a
    completion, which has `prompt` instead (text or token ids). custom_id: set only for `batch` lines, which make
    exactly one request. params: the settings that the line (its body, for `batch`) gives; see Settings. model: the name
    that it gives, or None. switches: what it tells the template. one_call: it wants one tool call in an answer at most.
    warnings: sentences about what of its messages is not read. columns: the line's keys that take no part in the
    answers. digest: xxh3-128, in hex, of the line as it was read. file_line: the file and the line in it, if the input
    has several files; `line` counts through all of them. unnamed: the parsed line if it has no id of its own, by whose
    content its draws are then told apart. reading: what of the line was read as what, if its layout is another tool's.
    text: the user's only message, if the line has it as a text, for a model without a chat template.
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
    switches: Switches = field(default_factory=Switches)
    one_call: bool = False
    warnings: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    digest: str = ""
    file_line: tuple[str, int] | None = None
    unnamed: dict[str, Any] | None = None
    reading: str | None = None
    text: str | None = None

    def request_id(self, turn: int) -> str:
        """A turn's custom_id: the line's own for `batch`, else `<conversation id>#<turn>`."""
        return self.custom_id if self.custom_id is not None else f"{self.id}#{turn}"

    @property
    def is_single(self) -> bool:
        """Whether it is one request, whatever its messages are: a batch line, a completion, or one that continues its
        last message."""
        return self.source_format == "batch" or self.prompt is not None or self.switches.continue_final_message

    def requests(self, turns: Turns) -> list[Turn]:
        """Its requests, in order; RequestError if there is none. A batch line's turn is 1."""
        if not self.is_single:
            return choose_turns(self.messages, turns)
        number = 1 if self.source_format == "batch" else self.place(len(self.messages))
        return [Turn(number, len(self.messages))]

    def make_completion(self) -> bool:
        """Ask the user's text without a template, if it is all that the line asks; whether that is so."""
        if self.text is None:
            return False
        self.prompt, self.messages, self.text = self.text, [], None
        return True

    def place(self, num_messages: int) -> int:
        """The number, from 1, of the assistant's message that an answer behind so many messages is, or continues."""
        made = sum(1 for message in self.messages[:num_messages] if message["role"] == "assistant")
        return made if self.switches.continue_final_message else made + 1


@dataclass(slots=True)
class BadLine:
    """One input line that cannot be answered. custom_id: of its (first) request, if the line tells it. digest,
    file_line: as for a Conversation. source_format: the line's format, if it has one. record: what the line holds, if
    it could be parsed."""

    line: int
    error: RequestError
    custom_id: str | None = None
    digest: str = ""
    source_format: Format | None = None
    record: object = None
    file_line: tuple[str, int] | None = None


def parse_line(data: bytes, line: int, options: LineOptions = ANY_LINE) -> Conversation | BadLine:
    """Parse one JSON line."""
    try:
        record = read_json(data)
    except JSONDecodeError as error:
        message = f"not valid JSON: {error.msg} at column {error.colno}"
        return BadLine(line, RequestError("invalid_json", message, line))
    return parse_record(record, line, options, settle_line)


def parse_record(
    record: object,
    line: int,
    options: LineOptions = ANY_LINE,
    settle: Callable[[dict[str, Any]], dict[str, Any]] = lambda record: record,
) -> Conversation | BadLine:
    """Check one parsed record. settle: takes out the nulls of a table, once it is laid out."""
    custom_id: str | None = None
    source_format: Format | None = None
    try:
        if not isinstance(record, dict):
            raise wrong("the line", record, "an object")
        if options.columns:  # one of them may be missing
            custom_id = _first_request_id({"id": record.get(options.id or "id")}, line, "messages")
            source_format = "messages" if has_layout(record, options) else None
        laid_out = lay_out(record, options)
        record = settle(laid_out.record)
        source_format = _choose_format(record, laid_out, options.format)
        custom_id = _first_request_id(record, line, source_format)
        columns = check_line(record, source_format)
        conversation = _READERS[source_format](record, line)
        conversation.columns, conversation.reading, conversation.text = columns, laid_out.reading, laid_out.text
        if options.system_prompt is not None and conversation.messages:
            _add_system_prompt(conversation, options.system_prompt)
        return conversation
    except RequestError as error:
        located = RequestError(error.code, error.message, line)
        return BadLine(line, located, custom_id, source_format=source_format, record=record)


def _add_system_prompt(conversation: Conversation, text: str) -> None:
    """Put it before the messages of a conversation that has none."""
    if all(message["role"] != "system" for message in conversation.messages):
        conversation.messages.insert(0, {"role": "system", "content": text})
        conversation.text = None


def _choose_format(record: dict[str, Any], laid_out: LaidOut, wanted: Format | None) -> Format:
    found = detect_format(record)
    if found is not None and (wanted in (None, found) or laid_out.reading is not None):
        return found
    keys = ", ".join(shown(str(key)) for key in list(record)[:8]) or "none"
    expected = _KEYS[wanted] if wanted else '"messages", "custom_id" with "body", or "conversations"'
    kind = f"a line of the format {wanted}" if wanted else "the line"
    fix = remedy(record) if wanted in (None, "messages") else f"; leave --format {wanted} out, or give such lines"
    raise RequestError("invalid_request", f"{kind} needs {expected}; its keys are {keys}{fix}")


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
    unread = Unread()
    messages = check_messages(record["messages"], unread=unread)
    return _conversation(record, line, messages, check_tools(record.get("tools"), unread=unread), unread, "messages")


def _read_sharegpt(record: dict[str, Any], line: int) -> Conversation:
    unread = Unread()
    messages, tools = check_sharegpt(record, unread)
    return _conversation(record, line, messages, tools, unread, "sharegpt")


def _conversation(
    record: dict[str, Any],
    line: int,
    messages: list[Message],
    tools: list[Tool] | None,
    unread: Unread,
    source_format: Format,
) -> Conversation:
    """A line that has its settings beside its messages."""
    settings = check_settings(record)
    tools = shown_tools(record, tools)
    settings.params.update(given_structure(record, tools))
    _check_end(messages, settings)
    return Conversation(
        _check_id(record, line),
        line,
        messages,
        tools,
        source_format,
        params=settings.params,
        model=settings.model,
        switches=settings.switches,
        one_call=settings.one_call,
        warnings=unread.warnings(),
        unnamed=record if record.get("id") is None else None,
    )


def _check_end(messages: list[Message], settings: Settings) -> None:
    """Refuse to continue what is no content of the assistant."""
    if not settings.switches.continue_final_message:
        return
    if not messages or messages[-1]["role"] != "assistant":
        role = f"of the role {messages[-1]['role']}" if messages else "missing"
        raise invalid(f"continue_final_message is true, and the last message is {role}; expected assistant")
    if messages[-1].get("tool_calls"):
        raise invalid("continue_final_message is true, and the last message ends with tool calls, not with content")


def _read_batch(record: dict[str, Any], line: int) -> Conversation:
    body = check_batch(record)
    _check_end(body.messages, body.settings)
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
        body.settings.switches,
        body.settings.one_call,
        body.warnings,
    )


_READERS = {"messages": _read_messages, "batch": _read_batch, "sharegpt": _read_sharegpt}
_KEYS = {"messages": '"messages"', "batch": '"custom_id" and "body"', "sharegpt": '"conversations"'}
