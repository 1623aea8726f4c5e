"""Objects as a table keeps them: which of their nulls mean that nothing was there, and in which order the keys stood.

A table has one type for a column, so each of its objects has the keys of all of them, in one order, with nulls for
those that the row did not have. Nothing in the table tells such a null from one that was there. The rules:

1. Text keeps its nulls: a JSON line, JSON text in a column, a column of the type Json.
2. A null field of a table's struct is absent. But a call's argument that is null stays where the schema of its tool
   says that the call has it: the parameter is required, or its type allows null, or it is a parameter of the tool and
   null in the whole table.
3. A JSON line that shows the nulls of a table, as `to_json` writes them, is treated as 2. Messages show them if all of
   a line have the same keys in the same order, a message that calls nothing has a null `tool_calls`, and all arguments
   have the same keys. Tools show them if a key of a schema is null that never can be.
4. The keys of 2 and 3 come in the order that the schema tells: arguments in that of the tool's parameters, and those
   parameters of a tool that are required in that of `required`, at the places where the table has one of them. In the
   conversations that this was measured on, the rule changes nothing that was not a table's order.

Must not know: files, formats. Every function is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

Record = dict[str, Any]
_MAY_BE_NULL = frozenset({"default", "const", "example", "examples", "enum"})
_CHOICES = ("anyOf", "oneOf")


class Added:
    """Takes the place of a null that a table may have put in. always: it is null in every row of the table."""

    def __init__(self, always: bool = False) -> None:
        self.always = always


class Struct(Record):
    """An object as a table keeps it: keys and order are those of the column."""


ADDED, ALWAYS_NULL = Added(), Added(always=True)


def settle_row(row: Record) -> Record:
    """A row of a table as its JSON line would be: each Added is a null or is gone."""
    return cast(Record, _settled(row, _schemas(row)))


def settle_line(record: Record) -> Record:
    """The record of a JSON line, without the nulls of a table; the same object if it shows none."""
    try:
        marked, body = _marked(record), record.get("body")
        if isinstance(body, dict) and (marked_body := _marked(body)) is not body:
            marked = marked | {"body": marked_body}
        return record if marked is record else settle_row(marked)
    except RecursionError:  # no table nests as deeply as JSON may
        return record


def _marked(record: Record) -> Record:
    """The record with an Added for each null that a table has put in; the same object if there is none."""
    marked = record
    messages, tools = record.get("messages"), record.get("tools")
    if isinstance(messages, list) and _messages_are_filled(messages):
        marked = marked | {"messages": _with_marks(messages)}
    if isinstance(tools, list) and any(map(_is_filled, tools)):
        marked = marked | {"tools": _with_marks(tools)}
    return marked


def _messages_are_filled(messages: list[Any]) -> bool:
    """Whether the messages show the nulls of a table (rule 3)."""
    first = messages[0] if messages else None
    if len(messages) < 2 or not isinstance(first, dict) or "tool_calls" not in first:
        return False
    keys = tuple(first)
    if not all(isinstance(message, dict) and tuple(message) == keys for message in messages):
        return False
    if not any(message["tool_calls"] is None and message.get("role") != "assistant" for message in messages):
        return False
    return len({tuple(arguments) for arguments in _arguments_in(messages)}) == 1


def _arguments_in(messages: Iterable[Any]) -> Iterator[Record]:
    for message in messages:
        calls = message["tool_calls"]
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, dict):
                yield arguments


def _is_filled(schema: object) -> bool:
    """Whether a tool, or a schema in it, has a null where none can be."""
    if isinstance(schema, dict):
        keys = schema.keys() - _MAY_BE_NULL
        return any(schema[key] is None or _is_filled(schema[key]) for key in keys)
    return isinstance(schema, list) and any(map(_is_filled, schema))


def _with_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return Struct((key, ADDED if item is None else _with_marks(item)) for key, item in value.items())
    return [_with_marks(item) for item in value] if isinstance(value, list) else value


def _settled(value: Any, schemas: Mapping[str, Record]) -> Any:
    if isinstance(value, dict):
        name, arguments = value.get("name"), value.get("arguments")
        settled = {key: _settled(item, schemas) for key, item in value.items() if not isinstance(item, Added)}
        if isinstance(name, str) and isinstance(arguments, dict):
            settled["arguments"] = _settled_arguments(arguments, schemas.get(name, {}))
        if isinstance(value.get("properties"), Struct) and isinstance(value.get("required"), list):
            settled["properties"] = _as_required(settled["properties"], settled["required"])
        return settled
    return [_settled(item, schemas) for item in value] if isinstance(value, list) else value


def _settled_arguments(value: Any, schema: Any) -> Any:
    """Arguments, or a part of them, with the nulls that their schema allows for."""
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, dict):
        parameters, required = schema.get("properties"), schema.get("required")
        parameters = parameters if isinstance(parameters, dict) else {}
        required = required if isinstance(required, list) else []
        settled = {}
        for key, item in value.items():
            if not isinstance(item, Added):
                settled[key] = _settled_arguments(item, parameters.get(key))
            elif key in required or _allows_null(parameters.get(key)) or (item.always and key in parameters):
                settled[key] = None
        if isinstance(value, Struct):
            known = {key: settled[key] for key in parameters if key in settled}
            settled = known | settled
        return settled
    if isinstance(value, list):
        return [_settled_arguments(item, schema.get("items")) for item in value]
    return value


def _as_required(properties: Record, required: list[Any]) -> Record:
    """The properties with the required ones among them in the order of `required`."""
    names = [name for name in required if isinstance(name, str) and name in properties]
    if len(set(names)) < len(names):
        return properties
    in_order = iter(names)
    return {name: properties[name] for name in (next(in_order) if key in names else key for key in properties)}


def _allows_null(schema: object) -> bool:
    """Whether a parameter may be null."""
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if kind == "null" or (isinstance(kind, list) and "null" in kind) or schema.get("nullable") is True:
        return True
    return any(any(map(_allows_null, schema[word])) for word in _CHOICES if isinstance(schema.get(word), list))


def _schemas(row: Record) -> dict[str, Record]:
    """The schema of each tool's parameters, by the tool's name."""
    found: dict[str, Record] = {}
    for holder in (row, row.get("body")):
        tools = holder.get("tools") if isinstance(holder, dict) else None
        for tool in _settled(tools, {}) if isinstance(tools, list) else ():
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                schema = function.get("parameters", function.get("input_schema"))
                found[function["name"]] = schema if isinstance(schema, dict) else {}
    return found
