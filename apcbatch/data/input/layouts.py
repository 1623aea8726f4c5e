"""Convert lines in the layouts of other tools to `messages` or sharegpt lines.

Invariant: if no option names a column, a line whose messages are in `messages` and have a `role` is changed in one way
at most: JSON text in `messages` or `tools` is parsed, and `functions` become `tools`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from apcbatch.address import reason_of
from apcbatch.config import COLUMN_OPTIONS, Config
from apcbatch.data.checks import invalid, need_object, shown, shown_keys, wrong
from apcbatch.data.json_text import json_or_text
from apcbatch.errors import RequestError, UsageError
from apcbatch.formats import Format, detect_format
from apcbatch.option_values import FILE_MARK
from apcbatch.regular_files import read_regular_file

Record = dict[str, Any]
MAX_SYSTEM_PROMPT_BYTES = 1 << 20
_ANSWERS = ("chosen", "completion")  # keys of the recorded answer to a prompt (TRL)


@dataclass(frozen=True, slots=True)
class LineOptions:
    """Options for reading lines.

    format: the only format accepted; None detects it by the keys. messages, prompt, tools, id: names of the columns
    that hold these; None finds them by their usual names. system_prompt: text for conversations without a system
    message. numbered: ids are not read; each line is named by its number. ignored: columns to leave out.
    keeps_rows: conversations keep their parsed lines.
    """

    format: Format | None = None
    messages: str | None = None
    prompt: str | None = None
    tools: str | None = None
    id: str | None = None
    system_prompt: str | None = None
    numbered: bool = False
    ignored: frozenset[str] = frozenset()
    keeps_rows: bool = False

    @classmethod
    def of(cls, config: Config) -> LineOptions:
        """Take the options from a configuration.

        Raises UsageError for options that exclude each other, and for an unreadable file of --system-prompt."""
        numbered = config.id_column == "none"
        columns = {name: getattr(config, name) for name in COLUMN_OPTIONS} | ({"id_column": None} if numbered else {})
        named = [config.origins[name] for name, value in columns.items() if value is not None]
        format = None if config.format == "auto" else cast(Format, config.format)
        if named and format not in (None, "messages"):
            origin = config.origins["format"]
            raise UsageError(f"{named[0]} is for lines of the format messages, and {origin} is {format}; leave one out")
        if config.messages_column is not None and config.prompt_column is not None:
            raise UsageError(f"{named[0]} and {named[1]} exclude each other; give one of them")
        return cls(
            "messages" if named else format,
            config.messages_column,
            config.prompt_column,
            config.tools_column,
            columns["id_column"],
            _system_prompt(config),
            numbered,
            frozenset((config.ignore_columns or "").split(",")) - {""},
            config.turns == "live",
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that the options name."""
        return tuple(name for name in (self.messages, self.prompt, self.tools, self.id) if name is not None)

    def left_out(self, record: Record) -> set[str]:
        """Return the keys of a line that the options leave out."""
        return {*self.ignored & record.keys(), *({"id"} & record.keys() if self.numbered else ())}


ANY_LINE = LineOptions()


class LaidOut(NamedTuple):
    """A record in the layout of its format.

    reading: clause that names the columns read, as in `messages from "traj"`; None if nothing had to move. text: the
    only user message, if the line gives it as a text and has no tools; otherwise None.
    """

    record: Record
    reading: str | None = None
    text: str | None = None


def lay_out(record: Record, options: LineOptions) -> LaidOut:
    """Convert a record in another tool's known layout to one of the formats.

    The record in the result is the same object if nothing has to change. In a record of unknown layout only the tools
    are parsed. Raises RequestError for a line without a column that the options name, and for a prompt column that
    holds neither a text nor messages."""
    if options.columns:
        return _by_options(record, options)
    messages = record.get("messages")
    if messages is not None and not isinstance(messages, str) and _with_tools(record) is record:
        return LaidOut(record)
    if options.format not in (None, "messages") or detect_format(record) == "batch":
        body = record.get("body")
        return LaidOut({**record, "body": _with_functions(body)} if isinstance(body, dict) else _with_tools(record))
    return _found(_with_tools(record))


def has_layout(record: Mapping[str, Any], options: LineOptions = ANY_LINE) -> bool:
    """Return whether a line, or a row of a table, has a key of a known layout, or a column of messages or of a prompt
    that the options name."""
    names = (options.messages, options.prompt, *_LAYOUTS)
    return detect_format(record) is not None or any(record.get(name) is not None for name in names if name is not None)


def _by_options(record: Record, options: LineOptions) -> LaidOut:
    """Move the columns that the options name to `id`, `tools` and `messages`. The prompt becomes `messages` too: a text
    becomes one user message."""
    taken, read = dict(record), []
    for place, name in (("id", options.id), ("tools", options.tools), ("messages", options.messages)):
        if name is None:
            continue
        if name not in record or (record[name] is None and place != "tools"):
            raise _missing_column(record, name)
        if name != place and name in taken:
            del taken[name]
        taken[place] = record[name]
        read.append(f"{place} from {shown(name)}")
    if options.messages is not None:
        found = _placed(taken, "messages", parsed_messages(taken["messages"]))
    elif options.prompt is None:
        found = _found(_with_tools(taken))
    else:
        prompt = record.get(options.prompt)
        if prompt is None:
            raise _missing_column(record, options.prompt)
        laid_out = _of_prompt(taken, options.prompt, parsed_messages(prompt))
        if laid_out is None:
            raise wrong(options.prompt, prompt, "a text or a list of messages")
        found = laid_out
    if found.reading is not None:
        read.append(found.reading)
    return LaidOut(_with_tools(found.record), ", ".join(read), found.text)


def _missing_column(record: Record, name: str) -> RequestError:
    state = "null in" if name in record else "missing from"
    return invalid(f"the column {shown(name)} is {state} the line; its keys are {shown_keys(record)}")


def _found(record: Record) -> LaidOut:
    """Convert a record by the first known layout that it has; leave it unchanged if it has none."""
    if record.get("messages") is not None:
        return _placed(record, "messages", parsed_messages(record["messages"]))
    for name, read in _LAYOUTS.items():
        value = record.get(name)
        if value is not None and (found := read(record, name, parsed_messages(value))) is not None:
            return found
    return LaidOut(record)


def _of_messages(record: Record, name: str, value: Any) -> LaidOut | None:
    """Convert a record whose key `name` holds a list of messages; return None for any other value."""
    return _placed(record, name, value) if is_conversation(value) else None


def _placed(record: Record, name: str, value: Any) -> LaidOut:
    """Move the messages from `name` to `conversations` if they have `from` in place of `role`, else to `messages`."""
    place = "conversations" if _is_spoken(value) else "messages"
    if name == place:
        return LaidOut(record if record[name] is value else {**record, name: value})
    rest = {key: one for key, one in record.items() if key not in (name, "messages", "conversations")}
    return LaidOut({**rest, place: value}, f"messages from {shown(name)}" if name != "messages" else None)


def _of_prompt(record: Record, name: str, value: Any) -> LaidOut | None:
    """Convert a record whose key `name` holds a prompt, and append the recorded answer if the record has one.

    The prompt is a text or a list of messages; return None for any other value."""
    text = value if isinstance(value, str) else None
    if text is not None:
        value, reading = [{"role": "user", "content": text}], f"one user message from {shown(name)}"
    elif is_conversation(value):
        reading = f"messages from {shown(name)}"
    else:
        return None
    rest = {key: one for key, one in record.items() if key != name}
    for key in _ANSWERS:
        if key == name:
            continue
        answer = parsed_messages(record.get(key))
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if not is_conversation(answer) or _is_spoken(answer) or _is_spoken(value):
            continue
        if answer[0].get("role") == "assistant":
            answer = [*value, *answer]
        if answer[: len(value)] == value:
            value = answer
            del rest[key]
            reading += f", the recorded answer from {shown(key)}"
            break
    found = _placed({**rest, "messages": value}, "messages", value)
    has_tools = bool(rest.get("tools"))
    return LaidOut(found.record, reading, None if has_tools else text)


def _of_sample(record: Record, name: str, value: Any) -> LaidOut | None:
    """Convert a sample of Inspect, which has an input (a text or messages) and a target; None without a target."""
    return _of_prompt(record, name, value) if "target" in record else None


def _of_query(record: Record, name: str, value: Any) -> LaidOut | None:
    """Convert a line of xLAM, which has a query and tools; None without tools."""
    return _of_prompt(record, name, value) if record.get("tools") else None


def _of_params(record: Record, name: str, value: Any) -> LaidOut | None:
    """Convert a request of Anthropic's Message Batches to a batch line; None for other `params`."""
    if "custom_id" not in record or not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        return None
    body = {_OF_ANTHROPIC.get(key, key): one for key, one in value.items() if key not in ("system", "tool_choice")}
    if value.get("system"):
        body["messages"] = [{"role": "system", "content": value["system"]}, *body["messages"]]
    if value.get("tool_choice") is not None:
        choice = need_object(value["tool_choice"], f"{name}.tool_choice")
        kind = choice.get("type")
        function = {"type": "function", "function": {"name": choice.get("name")}}
        body["tool_choice"] = function if kind == "tool" else "required" if kind == "any" else kind
        if choice.get("disable_parallel_tool_use") is True:
            body["parallel_tool_calls"] = False
    rest = {key: one for key, one in record.items() if key != name}
    return LaidOut({**rest, "body": body}, f"request from {shown(name)}")


_OF_ANTHROPIC = {"stop_sequences": "stop"}  # Anthropic's name of a setting -> OpenAI's

# Keys of conversations in other layouts, in the order of the search, with the converter of each.
_LAYOUTS: Mapping[str, Callable[[Record, str, Any], LaidOut | None]] = {
    "conversation": _of_messages,
    "conversations": _of_messages,
    "traj": _of_messages,
    "prompt": _of_prompt,
    "input": _of_sample,
    "query": _of_query,
    "params": _of_params,
}


def _with_functions(fields: Record) -> Record:
    """Move the older `functions` and `function_call` of a line or a body to absent `tools` and `tool_choice`."""
    functions = fields.get("functions")
    if not isinstance(functions, list) or not functions or fields.get("tools") is not None:
        return fields
    moved = {key: one for key, one in fields.items() if key not in ("functions", "function_call")}
    moved["tools"] = [{"type": "function", **one} if isinstance(one, dict) else one for one in functions]
    choice = fields.get("function_call")
    if choice is not None:
        moved["tool_choice"] = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    return moved


def _with_tools(record: Record) -> Record:
    """Parse the record's tools if they are JSON text; an empty text and the text `null` become None. Without tools take
    its functions. Return the same object if nothing has to change."""
    tools = record.get("tools")
    if not isinstance(tools, str):
        return _with_functions(record)
    return {**record, "tools": None if tools.strip() in ("", "null") else parsed_messages(tools)}


def parsed_messages(value: Any) -> Any:
    """Parse a JSON text that holds a list of objects; return any other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] != "[":
        return value
    parsed = json_or_text(value)
    return parsed if isinstance(parsed, list) and all(isinstance(item, dict) for item in parsed) else value


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list whose first item is a message with `role`, or with `from`."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and (isinstance(first.get("role"), str) or _is_spoken(value))


def _is_spoken(value: Any) -> bool:
    """Return whether a value is a list whose first item is a sharegpt message: it has `from` and no `role`."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and "from" in first and "role" not in first


def _system_prompt(config: Config) -> str | None:
    """Return the text of --system-prompt, or of the file that it names (`@FILE`), without the file's last line end."""
    given = config.system_prompt
    if given is None or not given.startswith(FILE_MARK):
        return given
    path = given.removeprefix(FILE_MARK)
    where = f"{config.origins['system_prompt']}: the file {path}"
    try:
        text = read_regular_file(path, MAX_SYSTEM_PROMPT_BYTES).decode().removesuffix("\n").removesuffix("\r")
    except (OSError, ValueError) as error:
        why = reason_of(error, path)
        raise UsageError(f"{where} cannot be read as UTF-8 text ({why}); give @ and the file of the prompt") from None
    if not text:
        raise UsageError(f"{where} is empty; put the system prompt into it, or leave the option out")
    return text
