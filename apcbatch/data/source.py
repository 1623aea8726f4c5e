"""INPUT as a stream of conversations: lines and documents of JSON, rows of tables and of Hugging Face datasets.

Must not know: templates, tokens, jobs. Invariants: only the current line is held, or the current batch of rows; lines
are numbered through all files, as `cat` would join them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import xxhash

from apcbatch.address import shown_address
from apcbatch.data.columns import UnusedColumns
from apcbatch.data.faults import Faults
from apcbatch.data.files import STDIN, Stream, check_readable, open_stream, reason
from apcbatch.data.hub import hub_errors, is_hub, open_hub
from apcbatch.data.inputs import Inputs, find_inputs
from apcbatch.data.lines import DEFAULT_MAX_LINE_BYTES, BrokenEnd, LongLine, read_lines
from apcbatch.data.records import BadLine, Conversation, parse_line, parse_record
from apcbatch.data.tables import open_table, rows_in, table_errors
from apcbatch.errors import ErrorCode, RequestError, UsageError
from apcbatch.formats import FORMAT_CHOICES, Format

Record = Conversation | BadLine
Warn = Callable[[str], None]


def open_source(
    inputs: Inputs | str,
    format: str = "auto",
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    warn: Warn = lambda sentence: None,
) -> Iterator[Record]:
    """Every line of the input as a Conversation or a BadLine, lazily and in order.

    inputs: what find_inputs has found, or one name for it. format: one of FORMAT_CHOICES; `auto` decides line by line,
    by the keys. A file that cannot be read further ends in a BadLine that says so, and warn gets the same sentence.
    warn is told of columns too that take no part in the answers. Raises UsageError at once for an input that is not
    there, or a table that is none. While iterating, raises it if of the first file nothing can be read, or its first
    hundred lines all fail in the same way; another such file ends in a BadLine.
    """
    if format not in FORMAT_CHOICES:
        raise UsageError(f"the input format is {format!r}; expected one of {', '.join(FORMAT_CHOICES)}")
    found = find_inputs([inputs], warn) if isinstance(inputs, str) else inputs
    reader = _Reader(None if format == "auto" else cast(Format, format), max_line_bytes, warn)
    return _watched(reader.read(found.files, {name: reader.begin(name) for name in found.files}), warn)


def _watched(records: Iterator[Record], warn: Warn) -> Iterator[Record]:
    """The same records; warn is told of columns that take no part in the answers."""
    unused = UnusedColumns(warn)
    for record in records:
        if isinstance(record, Conversation):
            unused.note(record.columns, record.line)
        yield record


class _Reader:
    """Reads one file after the other. before: lines of the files before the current one. line: the current one's latest
    line."""

    def __init__(self, wanted: Format | None, max_line_bytes: int, warn: Warn) -> None:
        self._wanted, self._max_line_bytes, self._warn = wanted, max_line_bytes, warn
        self._before = self._line = 0

    def begin(self, name: str) -> Iterable[Any] | None:
        """Whatever can be known at once to be unreadable is refused. The rows of a dataset, which must be opened."""
        if is_hub(name):
            return rows_in(open_hub(name))
        check_readable(name)
        if os.path.isfile(name):
            with open_stream(name) as stream:
                if kind := stream.table:
                    _table(stream, name, kind)
        return None

    def read(self, files: Iterable[str], rows: dict[str, Iterable[Any] | None]) -> Iterator[Record]:
        """The records of all files; each says where it stands if there are several."""
        several = len(rows) > 1
        for number, name in enumerate(files):
            shown = shown_address(name)
            try:
                for record in self._records(name, shown, rows[name]):
                    record.file_line = (shown, self._line) if several else None
                    yield record
            except UsageError as error:
                if not number:
                    raise
                self._warn(str(error))
                self._line += 1
                record = self._broken(str(error), "invalid_request")
                record.file_line = (shown, self._line)
                yield record
            self._before, self._line = self._before + self._line, 0

    def _records(self, name: str, shown: str, rows: Iterable[Any] | None) -> Iterator[Record]:
        faults = Faults(shown)
        if rows is not None:
            yield from self._rows(shown, rows, faults, hub_errors())
            return
        try:
            with open_stream(name) as stream:
                kind = stream.table
                if kind is None:
                    yield from self._lines(shown, stream, faults)
                else:
                    rows = rows_in(_table(stream, shown, kind))
                    yield from self._rows(shown, rows, faults, table_errors())
        except OSError as error:  # before the first line
            raise UsageError(f"cannot read {shown}: {reason(error)}") from None

    def _lines(self, name: str, stream: Stream, faults: Faults) -> Iterator[Record]:
        for number, data in read_lines(name, stream.chunks(), self._max_line_bytes):
            self._line = number
            if data == b"":
                continue
            if isinstance(data, BrokenEnd):
                self._warn(data.reason)
                yield self._broken(data.reason, "invalid_json")
                return
            line = self._before + self._line
            if isinstance(data, LongLine):
                limit = f"at most {self._max_line_bytes:,} are read"
                message = f"the line holds {data.num_bytes:,} bytes; {limit}: split it"
                record: Record = BadLine(line, RequestError("invalid_json", message, line))
                data = message.encode()
                _note(faults, record)
            else:
                record = parse_line(data, line, self._wanted)
                _note(faults, record, data)
            yield _signed(record, data)

    def _rows(
        self, name: str, rows: Iterable[Any], faults: Faults, errors: tuple[type[Exception], ...]
    ) -> Iterator[Record]:
        """The records of the rows. What a library raises where a table breaks off is a BadLine."""
        try:
            for number, row in enumerate(rows, start=1):
                self._line = number
                record = _read_row(row, self._before + self._line, self._wanted)
                _note(faults, record)
                yield record
        except errors as error:
            sentence = f"{name} cannot be read further after row {self._line}: {_first_line(error)}"
            if not self._line:
                raise UsageError(sentence) from None
            self._warn(sentence)
            self._line += 1
            yield self._broken(sentence, "invalid_request")

    def _broken(self, sentence: str, code: ErrorCode) -> BadLine:
        """What stands for the rest of a file, at the current line."""
        line = self._before + self._line
        record = BadLine(line, RequestError(code, sentence, line))
        _signed(record, sentence.encode())
        return record


def _table(stream: Stream, name: str, kind: str) -> Iterator[Any]:
    """The batches of a table; UsageError if it is none."""
    if not stream.raw.seekable():
        source = "standard input" if name == STDIN else name
        raise UsageError(f"{source} holds a table ({kind}), which cannot be read from a stream; give the file itself")
    try:
        return open_table(stream.raw, kind)
    except table_errors() as error:
        raise UsageError(f"cannot read {name} as {kind}: {_first_line(error)}") from None


def _read_row(row: object, line: int, wanted: Format | None) -> Record:
    try:
        return _signed(parse_record(row, line, wanted), ascii(row).encode())
    except RecursionError:
        message = "the row is nested too deeply"
        return _signed(BadLine(line, RequestError("invalid_request", message, line)), message.encode())


def _note(faults: Faults, record: Record, data: bytes = b"") -> None:
    """Tell how a line went."""
    if isinstance(record, BadLine):
        faults.note(record.error, data, record.source_format is not None)
    else:
        faults.note(None)


def _signed(record: Record, data: bytes) -> Record:
    """The record with the digest of what it was made from."""
    record.digest = xxhash.xxh3_128_hexdigest(data)
    return record


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:300] if lines else type(error).__name__
