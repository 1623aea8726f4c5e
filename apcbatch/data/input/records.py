"""Check a parsed input line; return it as a Conversation, or as a BadLine with its error.

Invariant: every JSON value becomes one of the two; none raises an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from json import JSONDecodeError
from typing import Any

from apcbatch.answer import AnswerWarning
from apcbatch.data.checks import invalid, is_integer, required, shown, shown_keys, wrong
from apcbatch.data.conversation import BadLine, Conversation, Message, Tool
from apcbatch.data.fields import BY_SHAPE, Shape, check_line
from apcbatch.data.grammar.llguidance import check_digits
from apcbatch.data.grammar.structured_output import given_structured_output
from apcbatch.data.input.known_formats import known_format, remedy
from apcbatch.data.input.layouts import ANY_LINE, LaidOut, LineOptions, has_layout, lay_out
from apcbatch.data.input.messages import MOST_WARNINGS, ContentWarnings, check_messages
from apcbatch.data.input.openai_batch import check_batch, check_prompt
from apcbatch.data.input.sharegpt import check_sharegpt
from apcbatch.data.input.tables import nulls_taken, settle_line
from apcbatch.data.input.tools import check_tools
from apcbatch.data.json_text import OddNumber, read_json, read_python_json
from apcbatch.data.request_settings import check_settings, shown_tools
from apcbatch.errors import RequestError
from apcbatch.formats import Format, detect_format


def parse_line(data: bytes, line: int, options: LineOptions = ANY_LINE) -> Conversation | BadLine:
    """Parse and check one JSON line. line: its number, from 1.

    A number that Python writes and JSON does not have, such as NaN, is accepted in a key that takes no part in the
    answers."""
    try:
        record = read_json(data)
    except JSONDecodeError as error:
        reason = _not_text(data) or f"{error.msg} at column {error.colno}"
    else:
        found = parse_record(record, line, options, settle_line)
        if isinstance(found, Conversation) and "structure" in found.params:
            try:
                check_digits(data, found.params["structure"])
            except ValueError as error:
                wrong_digits = RequestError("invalid_request", str(error), line)
                return BadLine(
                    line, wrong_digits, found.request_id(1), source_format=found.source_format, record=record
                )
        return found
    try:
        record = read_python_json(data)
    except ValueError:
        return BadLine(line, RequestError("invalid_json", f"not valid JSON: {reason}", line))
    parsed = parse_record(record, line, options, settle_line)
    if isinstance(parsed, BadLine) and parsed.source_format is not None:
        return parsed
    unread = _unread(parsed) if isinstance(parsed, Conversation) else ()
    for key, value in record.items() if isinstance(record, dict) else [("line", record)]:
        if key not in unread and _has_odd_number(value):
            reason = f"{shown(key)} holds NaN or Infinity, which are no numbers of JSON; write null, or leave it out"
            return BadLine(line, RequestError("invalid_json", f"not valid JSON: {reason}", line))
    return parsed


def _not_text(data: bytes) -> str | None:
    """Return a clause that names the first byte of a line that is not UTF-8; None if all are."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        column = len(data[: error.start].decode()) + 1
        return f"expected UTF-8, and not the byte 0x{data[error.start]:02x} at column {column}"
    return None


def _unread(conversation: Conversation) -> set[str]:
    """Return the keys of a line that take no part in its answers."""
    known = BY_SHAPE[conversation.source_format].values()
    return {*conversation.columns, *(field.name for field in known if field.kind == "harmless")}


def _has_odd_number(value: object) -> bool:
    """Return whether a parsed value is, or holds, a number that JSON does not have."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, OddNumber):
            return True
        if isinstance(one, (dict, list)):
            left += one.values() if isinstance(one, dict) else one
    return False


def parse_record(
    record: object,
    line: int,
    options: LineOptions = ANY_LINE,
    settle: Callable[[dict[str, Any]], dict[str, Any]] = lambda record: record,
) -> Conversation | BadLine:
    """Check one parsed record. settle: function that removes from the converted record the nulls that
    a table filled in."""
    custom_id: str | None = None
    name: str | None = None
    source_format: Format | None = None
    ignored: tuple[str, ...] = ()
    row = record
    try:
        if not isinstance(record, dict):
            raise wrong("the line", record, "an object")
        left_out = options.left_out(record)
        if left_out:
            given, record = record, {key: value for key, value in record.items() if key not in left_out}
            ignored = tuple(key for key in given if key in options.ignored and given[key] is not None)
        custom_id, name = _error_ids(record, line)
        if options.columns:  # lay_out raises if a named column is missing; the error then has these
            custom_id, name = _error_ids({"id": record.get(options.id or "id")}, line, "messages")
            source_format = "messages" if has_layout(record, options) else None
        laid_out = lay_out(record, options)
        record = settle(laid_out.record)
        source_format = _choose_format(record, laid_out, options.format)
        custom_id, name = _error_ids(record, line, source_format)
        columns = check_line(record, source_format) + ignored
        conversation = _check_record(record, line, source_format)
        conversation.columns, conversation.reading, conversation.text = columns, laid_out.reading, laid_out.text
        if taken := dict.fromkeys(nulls_taken(laid_out.record, record)) if record is not laid_out.record else {}:
            names = ", ".join(map(shown, list(taken)[:MOST_WARNINGS])) + ", and others" * (len(taken) > MOST_WARNINGS)
            sentence = f"nulls are taken out, as a table put them in: {names}"
            conversation.warnings = (*conversation.warnings, AnswerWarning("removed_nulls", sentence))
        messages, system_prompt = conversation.messages, options.system_prompt
        if system_prompt is not None and messages and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": system_prompt})
            conversation.text = None
        if options.keeps_rows and isinstance(row, dict):
            conversation.row = row
        return conversation
    except RequestError as error:
        located = RequestError(error.code, error.message, line)
        return BadLine(line, located, custom_id, name, source_format=source_format, record=record)


def _choose_format(record: dict[str, Any], laid_out: LaidOut, wanted: Format | None) -> Format:
    found = detect_format(record)
    if found is not None and (wanted in (None, found) or laid_out.reading is not None):
        return found
    if wanted is None and (known := known_format(record)):
        raise invalid(f"the line seems to be {known}")
    expected = _KEYS[wanted] if wanted else '"messages", "custom_id" with "body", or "conversations"'
    kind = f"a line of the format {wanted}" if wanted else "the line"
    fix = remedy(record) if wanted in (None, "messages") else f"; leave --format {wanted} out, or give such lines"
    raise invalid(f"{kind} needs {expected}; its keys are {shown_keys(record)}{fix}")


def _error_ids(record: dict[str, Any], line: int, source_format: Format | None = None) -> tuple[str | None, str | None]:
    """Return (custom_id, conversation id) for an error record of this line; None for those that it does not tell.
    source_format: None if it is not known."""
    custom_id = record.get("custom_id")
    if source_format == "batch" or (source_format is None and custom_id is not None):
        found = custom_id if isinstance(custom_id, str) and custom_id else None
        return found, found
    if source_format is None and record.get("id") is None:
        return None, None
    try:
        name = _check_id(record, line)
    except RequestError:
        name = f"line-{line}"
    return f"{name}#1", name


def _check_id(record: dict[str, Any], line: int) -> str:
    value = record.get("id")
    if value is None:
        return f"line-{line}"
    if is_integer(value):
        return str(value)
    if not isinstance(value, str) or not value:
        raise wrong("id", value, "a string that is not empty, or an integer")
    return value


def _check_record(record: dict[str, Any], line: int, source_format: Format) -> Conversation:
    """Check the content and the settings of a record that has the layout of its format."""
    shape: Shape = source_format
    custom_id, fields, where = None, record, ""
    if source_format == "batch":
        custom_id, shape, fields = check_batch(record)
        where = "body."
    warnings = ContentWarnings()
    messages: list[Message] = []
    tools: list[Tool] | None = None
    prompt = None
    if shape == "completions":
        prompt = check_prompt(fields)
    elif shape == "sharegpt":
        messages = check_sharegpt(fields, warnings)
    else:
        value = required(fields, "messages", f"{where}messages", "a list of messages")
        messages = check_messages(value, f"{where}messages", warnings)
    if shape != "completions":
        tools = shown_tools(fields, check_tools(fields.get("tools"), f"{where}tools", warnings))
    settings = check_settings(fields, where, counts_logprobs=shape == "completions")
    settings.params.update(given_structured_output(fields, tools, where))
    if settings.template_options.continue_final_message:
        _check_continued(messages)
    is_named = custom_id is not None or record.get("id") is not None
    # Drafts do not change the seed that is made of the record.
    unnamed = None if is_named else {name: value for name, value in record.items() if name != "draft"}
    return Conversation(
        custom_id or _check_id(record, line),
        line,
        messages,
        tools,
        source_format,
        custom_id,
        prompt,
        settings.params,
        settings.model,
        settings.template_options,
        settings.one_call,
        settings.draft,
        warnings.sentences(),
        unnamed=unnamed,
    )


def _check_continued(messages: list[Message]) -> None:
    """Raise RequestError unless the last message is the assistant's and has no tool calls."""
    if not messages or messages[-1]["role"] != "assistant":
        role = f"of the role {messages[-1]['role']}" if messages else "missing"
        raise invalid(f"continue_final_message is true, and the last message is {role}; expected assistant")
    if messages[-1].get("tool_calls"):
        raise invalid("continue_final_message is true, and the last message ends with tool calls, not with content")


_KEYS = {"messages": '"messages"', "batch": '"custom_id" and "body"', "sharegpt": '"conversations"'}
