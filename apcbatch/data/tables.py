"""Rows of parquet and arrow tables, as the JSON lines that they were made from.

Must not know: formats, files' names. Invariants: a few rows are held at a time (of arrow, the batch that they are in);
damaged data is checked before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from apcbatch.data.json_text import read_json
from apcbatch.data.nulls import ADDED, ALWAYS_NULL, Struct, settle_row

if TYPE_CHECKING:
    from pyarrow.lib import DataType, RecordBatch

Convert = Callable[[Any], Any]
ROWS_AT_ONCE = 64
JSON_COLUMNS = ("messages", "conversations", "tools", "body")


def open_table(raw: BinaryIO, kind: str) -> Iterator[RecordBatch]:
    """The batches of an open file, lazily; its schema is read at once. kind: `parquet` or `arrow`.

    Raises one of table_errors() for a file that is damaged, here or later.
    """
    import pyarrow.ipc
    import pyarrow.parquet

    library: Any = pyarrow  # without types
    raw.seek(0)
    if kind == "parquet":
        return iter(library.parquet.ParquetFile(raw).iter_batches(batch_size=ROWS_AT_ONCE))
    is_file = raw.read(1) == b"A"  # ARROW1
    raw.seek(0)
    if is_file:
        reader = library.ipc.open_file(raw)
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(library.ipc.open_stream(raw))


def rows_in(batches: Iterable[RecordBatch]) -> Iterator[dict[str, Any]]:
    """Each row as its JSON line would be (see data/nulls.py). A null column is absent; JSON text is parsed."""
    for batch in batches:
        batch.validate(full=True)
        convert = {field.name: _converter(field.type) for field in batch.schema}
        for begin in range(0, len(batch), ROWS_AT_ONCE):
            for row in batch.slice(begin, ROWS_AT_ONCE).to_pylist():
                yield _plain_row(row, convert)


def table_errors() -> tuple[type[Exception], ...]:
    """What pyarrow and `datasets` may raise for a table that is absent, damaged or out of reach."""
    from pyarrow.lib import ArrowException

    return (
        OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError,
        EOFError, MemoryError, ArrowException,
    )  # fmt: skip


def _plain_row(row: dict[str, Any], convert: dict[str, Convert | None]) -> dict[str, Any]:
    plain = {}
    for key, value in row.items():
        change = convert[key]
        if value is not None:
            value = value if change is None else change(value)
            plain[key] = _parsed(value) if key in JSON_COLUMNS else value
    return settle_row(plain)


def _converter(kind: DataType) -> Convert | None:
    """What makes a value of this type plain; None for a type whose values are plain already."""
    from pyarrow.types import is_fixed_size_list, is_large_list, is_list, is_map, is_struct

    if getattr(kind, "extension_name", None) == "arrow.json":
        return _parsed
    if is_struct(kind):
        return _struct_converter(kind)
    if is_map(kind):
        inner = _converter(kind.item_type)
        return lambda pairs: {str(key): _applied(inner, value) for key, value in pairs}
    if is_list(kind) or is_large_list(kind) or is_fixed_size_list(kind):
        inner = _converter(kind.value_type)
        return inner and (lambda values: [_applied(inner, value) for value in values])
    return None


def _struct_converter(kind: DataType) -> Convert:
    from pyarrow.types import is_null

    fields = [kind.field(number) for number in range(kind.num_fields)]
    parts = {field.name: _converter(field.type) for field in fields}
    nulls = {field.name: ALWAYS_NULL if is_null(field.type) else ADDED for field in fields}
    return lambda value: Struct(
        (key, nulls[key] if item is None else _applied(parts[key], item)) for key, item in value.items()
    )


def _applied(convert: Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def _parsed(value: Any) -> Any:
    """What a text says as JSON; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value
