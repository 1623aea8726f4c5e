"""INPUT as a stream of conversations: lines and documents of JSON, rows of tables and of Hugging Face datasets.

Must not know: templates, tokens, jobs. Invariants: only the current line is held, or the current batch of rows; lines
are numbered through all files, as `cat` would join them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import xxhash

from apcbatch.data.columns import MOST_NAMES, UnusedColumns
from apcbatch.data.documents import look_ahead
from apcbatch.data.faults import HEAD_BYTES, Faults
from apcbatch.data.files import BROKEN, STDIN, Stream, check_readable, open_stream, reason, shown_input
from apcbatch.data.hub import hub_errors, is_hub, open_hub
from apcbatch.data.inputs import Inputs, find_inputs
from apcbatch.data.layouts import ANY_LINE, LineOptions
from apcbatch.data.lines import DEFAULT_MAX_LINE_BYTES, BrokenEnd, LongLine, read_lines
from apcbatch.data.records import BadLine, Conversation, parse_line, parse_record
from apcbatch.data.separated import ERRORS, read_separated, separator_of
from apcbatch.data.tables import open_table, rows_in, table_errors
from apcbatch.errors import ErrorCode, RequestError, UsageError

Record = Conversation | BadLine
Warn = Callable[[str], None]


def open_source(
    inputs: Inputs | str,
    options: LineOptions = ANY_LINE,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    warn: Warn = lambda sentence: None,
) -> Iterator[Record]:
    """Every line of the input as a Conversation or a BadLine, lazily and in order.

    inputs: what find_inputs has found, or one name for it. A file that cannot be read further ends in a BadLine that
    says so, and warn gets the same sentence. warn is told of columns too that take no part in the answers, of layouts
    that were found, and of empty files beside others. Raises UsageError at once for an input that is not there, or if
    the first file is a table that cannot be read. While iterating, raises it if the first file with anything in it
    cannot be read or is of the wrong kind (see Faults), and if all are empty; another such file ends in a BadLine.
    """
    found = find_inputs([inputs], warn) if isinstance(inputs, str) else inputs
    reader = _Reader(options, max_line_bytes, warn)
    rows = {name: rows_in(open_hub(name)) for name in found.files if is_hub(name)}
    reader.begin(found.files[0])
    return _watched(reader.read(found, rows), warn)


def _watched(records: Iterator[Record], warn: Warn) -> Iterator[Record]:
    """The same records; warn is told of columns that take no part in the answers, and of each layout that was found."""
    unused = UnusedColumns(warn)
    readings: set[str] = set()
    for record in records:
        if isinstance(record, Conversation):
            unused.note(record.columns, record.line)
            if record.reading is not None and record.reading not in readings and len(readings) < MOST_NAMES:
                readings.add(record.reading)
                warn(f"line {record.line} is read as a conversation: {record.reading}")
        yield record


class _Reader:
    """Reads one file after the other. before: lines of the files before the current one. line: the current one's latest
    line."""

    def __init__(self, options: LineOptions, max_line_bytes: int, warn: Warn) -> None:
        self._options, self._max_line_bytes, self._warn = options, max_line_bytes, warn
        self._before = self._line = 0

    def begin(self, name: str) -> None:
        """Refuse a file of which can be known at once that it is unreadable."""
        if is_hub(name):
            return
        check_readable(name)
        if os.path.isfile(name):
            with open_stream(name) as stream:
                if kind := stream.table:
                    _table(stream, name, kind)

    def read(self, inputs: Inputs, rows: Mapping[str, Iterable[Any]]) -> Iterator[Record]:
        """The records of all files, each opened as it comes; each record says where it stands if there are several.
        rows: of the datasets among them."""
        several = len(inputs.files) > 1
        num_records = 0
        for name in inputs.files:
            shown, before = shown_input(name), num_records
            faults = Faults(shown, follows=num_records > 0)
            for record in self._until_unreadable(self._records(name, shown, rows.get(name), faults), faults):
                record.file_line = (shown, record.line - self._before) if several else None
                num_records += 1
                yield record
            if several and num_records == before:
                self._warn(f"{shown} is empty")
            self._before, self._line = self._before + self._line, 0
        if not num_records:
            raise UsageError(f"{inputs.shown} is empty: there is nothing to answer")

    def _until_unreadable(self, records: Iterator[Record], faults: Faults) -> Iterator[Record]:
        """The records of a file; if it cannot be read further, and there is a record before, one that says so."""
        try:
            yield from records
        except UsageError as error:
            if not faults.follows:
                raise
            self._warn(str(error))
            yield from faults.held
            self._line += 1
            yield self._broken(str(error), "invalid_request")

    def _records(self, name: str, shown: str, rows: Iterable[Any] | None, faults: Faults) -> Iterator[Record]:
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
        head, chunks = look_ahead(stream.chunks(), HEAD_BYTES)
        faults.check_head(head)
        separator = separator_of(head.partition(b"\n")[0], self._options)
        if separator is not None:
            rows = read_separated(chunks, separator, self._max_line_bytes)
            yield from self._rows(name, rows, faults, (*ERRORS, *BROKEN))
            return
        for number, data in read_lines(name, chunks, self._max_line_bytes):
            self._line = number
            if data == b"":
                continue
            if isinstance(data, BrokenEnd):
                yield from faults.end()
                self._warn(data.reason)
                yield self._broken(data.reason, "invalid_json")
                return
            line = self._before + self._line
            if isinstance(data, LongLine):
                limit = f"at most {self._max_line_bytes:,} are read"
                message = f"the line holds {data.num_bytes:,} bytes; {limit}: split it"
                record: Record = BadLine(line, RequestError("invalid_json", message, line))
                data = message.encode()
                yield from faults.take(_signed(record, data))
            else:
                record = parse_line(data, line, self._options)
                yield from faults.take(_signed(record, data), data)
        yield from faults.end()

    def _rows(
        self, name: str, rows: Iterable[Any], faults: Faults, errors: tuple[type[Exception], ...]
    ) -> Iterator[Record]:
        """The records of the rows. What a library raises where a table breaks off is a BadLine."""
        try:
            for number, row in enumerate(rows, start=1):
                self._line = number
                yield from faults.take(_read_row(row, self._before + self._line, self._options))
        except errors as error:
            sentence = f"{name} cannot be read further after row {self._line}: {_first_line(error)}"
            yield from faults.end()
            if not self._line:
                raise UsageError(sentence) from None
            self._warn(sentence)
            self._line += 1
            yield self._broken(sentence, "invalid_request")
        yield from faults.end()

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


def _read_row(row: object, line: int, options: LineOptions) -> Record:
    if isinstance(row, RequestError):
        return _signed(BadLine(line, RequestError(row.code, row.message, line)), row.message.encode())
    try:
        return _signed(parse_record(row, line, options), ascii(row).encode())
    except RecursionError:
        message = "the row is nested too deeply"
        return _signed(BadLine(line, RequestError("invalid_request", message, line)), message.encode())


def _signed(record: Record, data: bytes) -> Record:
    """The record with the digest of what it was made from."""
    record.digest = xxhash.xxh3_128_hexdigest(data)
    return record


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:300] if lines else type(error).__name__
