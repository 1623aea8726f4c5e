"""An input as a stream of conversations: JSON lines, or rows of parquet, arrow and Hugging Face datasets.

Must not know: templates, tokens, jobs. Invariant: only the current line is held, or the current batch of rows of the
library that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import orjson
import xxhash

from apcbatch.data.columns import UnusedColumns
from apcbatch.data.faults import Faults
from apcbatch.data.lines import (
    DEFAULT_MAX_LINE_BYTES,
    STDIN,
    BrokenEnd,
    LongLine,
    check_readable,
    read_lines,
)
from apcbatch.data.records import BadLine, Conversation, parse_line, parse_record
from apcbatch.errors import RequestError, UsageError
from apcbatch.formats import FORMAT_CHOICES, Format

HUB_PREFIX = "hf:"
_ROW_SUFFIXES = {".parquet": "parquet", ".arrow": "arrow"}
_JSON_COLUMNS = ("messages", "conversations", "tools", "body")


def open_source(
    spec: str,
    format: str = "auto",
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    warn: Callable[[str], None] = lambda sentence: None,
) -> Iterator[Conversation | BadLine]:
    """Every line of the input as a Conversation or a BadLine, lazily and in order.

    spec: a path (`.gz`, `.zst`: compressed JSON lines; `.parquet`, `.arrow`: rows), `-` for stdin, or
    `hf:org/name[:split]`. format: one of FORMAT_CHOICES; `auto` decides line by line, by the keys. An input that cannot
    be read further ends in a BadLine that says so, and warn gets the same sentence. warn is told of columns too that
    take no part in the answers. Raises UsageError at once for an input that is not there. While iterating, raises it
    for an input of which nothing can be read, or whose first hundred lines all fail in the same way.
    """
    if format not in FORMAT_CHOICES:
        raise UsageError(f"the input format is {format!r}; expected one of {', '.join(FORMAT_CHOICES)}")
    wanted = None if format == "auto" else cast(Format, format)
    if spec.startswith(HUB_PREFIX):
        return _watched(_read_rows(spec, _open_hub(spec), wanted, warn), warn)
    check_readable(spec)
    builder = _ROW_SUFFIXES.get(Path(spec).suffix.lower()) if spec != STDIN else None
    if builder is not None:
        return _watched(_read_rows(spec, _open_file(spec, builder), wanted, warn), warn)
    return _watched(_read_json(spec, wanted, max_line_bytes, warn), warn)


def _watched(
    records: Iterator[Conversation | BadLine], warn: Callable[[str], None]
) -> Iterator[Conversation | BadLine]:
    """The same records; warn is told of columns that take no part in the answers."""
    unused = UnusedColumns(warn)
    for record in records:
        if isinstance(record, Conversation):
            unused.note(record.columns, record.line)
        yield record


def _read_json(
    spec: str, wanted: Format | None, max_line_bytes: int, warn: Callable[[str], None]
) -> Iterator[Conversation | BadLine]:
    faults = Faults(spec)
    for line, data in read_lines(spec, max_line_bytes):
        record: Conversation | BadLine
        if isinstance(data, LongLine):
            message = f"the line holds {data.num_bytes:,} bytes; at most {max_line_bytes:,} are read: split it"
            record = BadLine(line, RequestError("invalid_json", message, line))
        elif isinstance(data, BrokenEnd):
            warn(data.reason)
            yield _signed(BadLine(line, RequestError("invalid_json", data.reason, line)), data.reason.encode())
            return
        else:
            record = parse_line(data, line, wanted)
        _note(faults, record, data if isinstance(data, bytes) else b"")
        yield _signed(record, data if isinstance(data, bytes) else message.encode())


def _note(faults: Faults, record: Conversation | BadLine, data: bytes = b"") -> None:
    """Tell how a line went."""
    if isinstance(record, BadLine):
        faults.note(record.error, data, record.source_format is not None)
    else:
        faults.note(None)


def _signed(record: Conversation | BadLine, data: bytes) -> Conversation | BadLine:
    """The record with the digest of what it was made from."""
    record.digest = xxhash.xxh3_128_hexdigest(data)
    return record


def _read_rows(
    spec: str, rows: Iterable[Any], wanted: Format | None, warn: Callable[[str], None]
) -> Iterator[Conversation | BadLine]:
    line, faults = 0, Faults(spec)
    try:
        for line, row in enumerate(rows, start=1):
            record = _read_row(row, line, wanted)
            _note(faults, record)
            yield record
    except _dataset_errors() as error:
        reason = f"{spec} cannot be read further after row {line}: {_first_line(error)}"
        if not line:
            raise UsageError(reason) from None
        warn(reason)
        yield _signed(BadLine(line + 1, RequestError("invalid_request", reason, line + 1)), reason.encode())


def _read_row(row: object, line: int, wanted: Format | None) -> Conversation | BadLine:
    try:
        return _signed(parse_record(_plain_row(row), line, wanted), ascii(row).encode())
    except RecursionError:
        message = "the row is nested too deeply"
        return _signed(BadLine(line, RequestError("invalid_request", message, line)), message.encode())


def _plain_row(row: object) -> object:
    """A row as its JSON line would be: a null in a column or field means that it is absent, and JSON text is parsed.

    A column has one type for all rows, so absent fields come as nulls, and mixed ones are often stored as text.
    """
    plain = _without_nulls(row)
    if isinstance(plain, dict):
        for key in _JSON_COLUMNS:
            if isinstance(plain.get(key), str):
                try:
                    plain[key] = orjson.loads(plain[key])
                except ValueError:
                    continue
    return plain


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(item) for item in value]
    return value


def _open_file(spec: str, builder: str) -> Iterable[Any]:
    """The rows of one parquet or arrow file, through `datasets` in streaming mode."""
    from datasets.load import load_dataset

    try:
        name = str(Path(spec).resolve())
        for character in "[*?":  # a file name is a pattern there
            name = name.replace(character, f"[{character}]")
        return cast(Iterable[Any], load_dataset(builder, data_files=[name], split="train", streaming=True))
    except _dataset_errors() as error:
        raise UsageError(f"cannot read {spec} as {builder}: {_first_line(error)}") from None


def _open_hub(spec: str) -> Iterable[Any]:
    """The rows of `hf:org/name[:split]`; without a split, the only one or `train`."""
    name, _, split = spec.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise UsageError(f"{spec} names no dataset; expected hf:org/name or hf:org/name:split")
    from datasets.load import load_dataset

    try:
        loaded = load_dataset(name, split=split or None, streaming=True)
    except _dataset_errors() as error:
        raise UsageError(
            f"cannot open {spec}: {_first_line(error)}; check the name, the split and the network, "
            "or download the dataset and give its parquet file"
        ) from None
    if not isinstance(loaded, dict):
        return cast(Iterable[Any], loaded)
    if len(loaded) == 1:
        return cast(Iterable[Any], next(iter(loaded.values())))
    if "train" not in loaded:
        raise UsageError(
            f"{spec} has the splits {', '.join(map(str, loaded))}; choose one: {spec}:{next(iter(loaded))}"
        )
    return cast(Iterable[Any], loaded["train"])


def _dataset_errors() -> tuple[type[Exception], ...]:
    """What `datasets` may raise for an input that is absent, damaged or out of reach."""
    from datasets.exceptions import DatasetsError
    from pyarrow.lib import ArrowException

    return (
        OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError,
        EOFError, MemoryError, ArrowException, DatasetsError,
    )  # fmt: skip


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:300] if lines else type(error).__name__
