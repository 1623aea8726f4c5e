"""Read rows of parquet, arrow and Hugging Face datasets as records, and remove the nulls that a table filled in.

All objects of a table's column have the same keys: the table fills the absent ones with null. docs/files.md,
"What a table does to nulls", has the three rules by which such nulls are removed. Invariants: at most ROWS_AT_ONCE rows
are in memory, for arrow one record batch. Data is validated before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from apcbatch.address import HUB_PREFIX
from apcbatch.data.checks import first_line
from apcbatch.data.json_text import json_or_text
from apcbatch.errors import UsageError
from apcbatch.formats import CONTENT_KEYS

if TYPE_CHECKING:
    from pyarrow.lib import DataType, RecordBatch


Record = dict[str, Any]
Convert = Callable[[Any], Any]
ROWS_AT_ONCE = 64
_JSON_COLUMNS = (*CONTENT_KEYS.values(), "tools")
_MAY_BE_NULL = frozenset({"default", "const", "example", "examples", "enum"})
_CHOICES = ("anyOf", "oneOf")


class Null(Enum):
    """Mark of a null in a row of a table, replaced by None or removed later.

    SOME: null in a column with a type of its own. ALL: null in a column of type null, in which every row is null.
    """

    SOME = 0
    ALL = 1


class Struct(Record):
    """An object of a table. Its keys and their order are those of the column."""


def open_table(raw: BinaryIO, kind: str) -> Iterator[RecordBatch]:
    """Read the schema of an open file; return a lazy iterator over its batches. kind: `parquet` or `arrow`.

    Raises one of table_errors() for a damaged file, here or while iterating.
    """
    import pyarrow.ipc
    import pyarrow.parquet

    library: Any = pyarrow  # it has no type annotations
    raw.seek(0)
    if kind == "parquet":
        return iter(library.parquet.ParquetFile(raw).iter_batches(batch_size=ROWS_AT_ONCE))
    is_file = raw.read(1) == b"A"  # ARROW1
    raw.seek(0)
    if is_file:
        reader = library.ipc.open_file(raw)
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(library.ipc.open_stream(raw))


def open_hub(spec: str) -> Iterator[RecordBatch]:
    """Open the dataset `hf:org/name[:split]`; return a lazy iterator over its batches.

    The default split is the only one, or `train`. Raises UsageError for a dataset that cannot be opened, and for
    several splits without a `train` among them."""
    name, _, split = spec.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise UsageError(f"{spec} names no dataset; expected hf:org/name or hf:org/name:split")
    from datasets.load import load_dataset

    try:
        loaded: Any = load_dataset(name, split=split or None, streaming=True)
    except hub_errors() as error:
        raise UsageError(
            f"cannot open {spec}: {first_line(error)}; check the name, the split and the network, "
            "or download the dataset and give its parquet file"
        ) from None
    if isinstance(loaded, dict):
        if len(loaded) > 1 and "train" not in loaded:
            splits = ", ".join(map(str, loaded))
            raise UsageError(f"{spec} has the splits {splits}; choose one: {spec}:{next(iter(loaded))}")
        loaded = next(iter(loaded.values())) if len(loaded) == 1 else loaded["train"]
    tables = loaded.with_format("arrow").iter(batch_size=ROWS_AT_ONCE)
    return (batch for table in tables for batch in table.to_batches())


def rows_in(batches: Iterable[RecordBatch]) -> Iterator[dict[str, Any]]:
    """Yield each row as the record of a JSON line, without its null columns. JSON text in _JSON_COLUMNS is parsed."""
    for batch in batches:
        batch.validate(full=True)
        converters = {field.name: _converter(field.type) for field in batch.schema}
        for begin in range(0, len(batch), ROWS_AT_ONCE):
            for row in batch.slice(begin, ROWS_AT_ONCE).to_pylist():
                plain = {key: _applied(converters[key], value) for key, value in row.items() if value is not None}
                parsed = {key: json_or_text(plain[key]) for key in _JSON_COLUMNS if key in plain}
                yield _settle_row({**plain, **parsed})


def table_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that pyarrow raises for a table that is absent, damaged or unreachable."""
    from pyarrow.lib import ArrowException

    return (
        OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError,
        EOFError, MemoryError, ArrowException,
    )  # fmt: skip


def hub_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that reading a Hugging Face dataset may raise."""
    from datasets.exceptions import DatasetsError

    return (*table_errors(), DatasetsError)


def _converter(kind: DataType) -> Convert | None:
    """Return a function that converts values of this type to JSON values; None if they need no conversion."""
    from pyarrow.types import is_fixed_size_list, is_large_list, is_list, is_map, is_null, is_struct

    if getattr(kind, "extension_name", None) == "arrow.json":
        return json_or_text
    if is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        parts = {field.name: _converter(field.type) for field in fields}
        nulls = {field.name: Null.ALL if is_null(field.type) else Null.SOME for field in fields}
        return lambda value: Struct(
            (key, nulls[key] if item is None else _applied(parts[key], item)) for key, item in value.items()
        )
    if is_map(kind):
        inner = _converter(kind.item_type)
        return lambda pairs: {str(key): _applied(inner, value) for key, value in pairs}
    if is_list(kind) or is_large_list(kind) or is_fixed_size_list(kind):
        inner = _converter(kind.value_type)
        return inner and (lambda values: [_applied(inner, value) for value in values])
    return None


def _applied(convert: Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def _settle_row(row: Record) -> Record:
    """Replace each Null in a row by None, or remove it."""
    return cast(Record, _settled(row, _schemas(row)))


def settle_line(record: Record) -> Record:
    """Remove from a record of JSON lines the nulls that a table filled in; return the same object if there are none."""
    try:
        marked, body = _marked(record), record.get("body")
        if isinstance(body, dict) and (marked_body := _marked(body)) is not body:
            marked = marked | {"body": marked_body}
        return record if marked is record else _settle_row(marked)
    except RecursionError:  # nested more deeply than any table, so no table filled it in
        return record


def _marked(record: Record) -> Record:
    """Replace with Null each null that a table filled in. Return the same object if there are none."""
    found = {}
    messages, tools = record.get("messages"), record.get("tools")
    if isinstance(messages, list) and _messages_are_filled(messages):
        found["messages"] = _with_marks(messages)
    if isinstance(tools, list) and tools and _objects_are_filled(tools):
        found["tools"] = _with_marks(tools)
    return record | found if found else record


def _messages_are_filled(messages: list[Any]) -> bool:
    """Return whether a table filled the messages with nulls (rule 3)."""
    first = messages[0] if messages else None
    if len(messages) < 2 or not isinstance(first, dict) or "tool_calls" not in first:
        return False
    keys = tuple(first)
    if not all(isinstance(message, dict) and tuple(message) == keys for message in messages):
        return False
    if not any(message["tool_calls"] is None and message.get("role") != "assistant" for message in messages):
        return False
    argument_keys = set()
    for message in messages:
        for call in message["tool_calls"] if isinstance(message["tool_calls"], list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, dict):
                argument_keys.add(tuple(arguments))
    return len(argument_keys) == 1


def _objects_are_filled(objects: list[Any], are_properties: bool = False) -> bool | None:
    """Return whether a table filled the tools of a line, or their parts at one place, with nulls (rule 3).

    None if a table cannot have made them: they are no objects with the same keys in the same order. are_properties: the
    keys are names of properties, none of which can be null."""
    keys = tuple(objects[0]) if isinstance(objects[0], dict) else ()
    if not all(isinstance(one, dict) and tuple(one) == keys for one in objects):
        return None
    is_filled = False
    for key in keys if are_properties else (key for key in keys if key not in _MAY_BE_NULL):
        given = [one[key] for one in objects if one[key] is not None]
        is_filled |= len(given) < len(objects) and (are_properties or bool(given))
        parts = [part for value in given for part in (value if isinstance(value, list) else [value])]
        if parts and all(isinstance(part, dict) for part in parts):
            below = _objects_are_filled(parts, key == "properties" and not are_properties)
            if below is None:
                return None
            is_filled |= below
    return is_filled


def nulls_taken(before: Any, after: Any) -> Iterator[str]:
    """Yield the key of each null that settle_line removed from a record."""
    if isinstance(before, dict):
        for key, value in before.items():
            if key not in after:
                yield key
            else:
                yield from nulls_taken(value, after[key])
    elif isinstance(before, list):
        for one, other in zip(before, after, strict=True):
            yield from nulls_taken(one, other)


def _with_marks(value: Any) -> Any:
    """Copy a value with a Null for each null in it and a Struct for each object."""
    if isinstance(value, dict):
        return Struct((key, Null.SOME if item is None else _with_marks(item)) for key, item in value.items())
    return [_with_marks(item) for item in value] if isinstance(value, list) else value


def _settled(value: Any, schemas: Mapping[str, Record]) -> Any:
    """Remove the Nulls from a value; in the arguments of calls, replace some by None (_settled_arguments). Put the
    properties of a schema in order (_as_required).

    schemas: tool name -> schema of the tool's parameters."""
    if isinstance(value, dict):
        name, arguments = value.get("name"), value.get("arguments")
        settled = {key: _settled(item, schemas) for key, item in value.items() if not isinstance(item, Null)}
        if isinstance(name, str) and isinstance(arguments, dict):
            settled["arguments"] = _settled_arguments(arguments, schemas.get(name, {}))
        if isinstance(value.get("properties"), Struct) and isinstance(value.get("required"), list):
            settled["properties"] = _as_required(settled["properties"], settled["required"])
        return settled
    return [_settled(item, schemas) for item in value] if isinstance(value, list) else value


def _settled_arguments(value: Any, schema: Any) -> Any:
    """Replace or remove the Nulls in arguments, or in a part of them, by their schema (rule 2).

    A Null becomes None if the schema requires the key or allows null, or if the whole column is null and the schema has
    the key. Any other Null is removed. The keys of a Struct get the schema's order."""
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [_settled_arguments(item, schema.get("items")) for item in value]
    if not isinstance(value, dict):
        return value
    parameters, required = schema.get("properties"), schema.get("required")
    parameters = parameters if isinstance(parameters, dict) else {}
    required = required if isinstance(required, list) else []
    settled = {}
    for key, item in value.items():
        if not isinstance(item, Null):
            settled[key] = _settled_arguments(item, parameters.get(key))
        elif key in required or _allows_null(parameters.get(key)) or (item is Null.ALL and key in parameters):
            settled[key] = None
    if isinstance(value, Struct):
        settled = {key: settled[key] for key in parameters if key in settled} | settled
    return settled


def _as_required(properties: Record, required: list[Any]) -> Record:
    """Sort the required properties by their order in `required`, within the places that they had; the others keep their
    places."""
    names = [name for name in required if isinstance(name, str) and name in properties]
    if len(set(names)) < len(names):
        return properties
    in_order = iter(names)
    return {name: properties[name] for name in (next(in_order) if key in names else key for key in properties)}


def _allows_null(schema: object) -> bool:
    """Return whether a parameter's schema allows null."""
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if kind == "null" or (isinstance(kind, list) and "null" in kind) or schema.get("nullable") is True:
        return True
    return any(any(map(_allows_null, schema[word])) for word in _CHOICES if isinstance(schema.get(word), list))


def _schemas(row: Record) -> dict[str, Record]:
    """Map the name of each tool in a row, or in its body, to the schema of its parameters."""
    found: dict[str, Record] = {}
    for holder in (row, row.get("body")):
        tools = holder.get("tools") if isinstance(holder, dict) else None
        for tool in _settled(tools, {}) if isinstance(tools, list) else ():
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                schema = function.get("parameters", function.get("input_schema"))
                found[function["name"]] = schema if isinstance(schema, dict) else {}
    return found
