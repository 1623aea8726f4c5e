"""Read INPUT as a stream of Conversations and BadLines, from JSON lines, JSON documents, tables and datasets.

Invariants: only the current line, or the current batch of rows, is in memory. Line numbers continue over all files, as
in the output of `cat`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from apcbatch.data.checks import first_line, shown
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.input.delimited import ERRORS, read_separated, separator_of
from apcbatch.data.input.files import BROKEN, Stream, check_readable, open_stream, reason, shown_input
from apcbatch.data.input.inputs import Inputs, find_inputs, is_hub
from apcbatch.data.input.layouts import ANY_LINE, LineOptions
from apcbatch.data.input.lines import MAX_LINE_BYTES, BrokenEnd, LongLine, look_ahead, read_lines
from apcbatch.data.input.records import parse_line, parse_record
from apcbatch.data.input.sniff import HEAD_BYTES, Sniffer
from apcbatch.data.input.tables import hub_errors, open_hub, open_table, rows_in, table_errors
from apcbatch.errors import ErrorCode, RequestError, UsageError

Record = Conversation | BadLine
Warn = Callable[[str], None]
MOST_NAMES = 32  # number of unused columns that warnings name


class UnusedColumns:
    """Warnings about unused columns that the options do not leave out. Each column is named once, up to MOST_NAMES
    columns; then one warning says that there are more."""

    def __init__(self, options: LineOptions, warn: Warn) -> None:
        self._ignored, self._warn = options.ignored, warn
        self._named: set[str] = set()
        self._full = options.keeps_rows  # the episode's code gets every column

    def note(self, columns: Sequence[str], line: int) -> None:
        """Warn of the columns that are new. columns: the unused columns of one line. line: its number, from 1."""
        new = [name for name in columns if name not in self._named and name not in self._ignored]
        if not new or self._full:
            return
        named = new[: MOST_NAMES - len(self._named)]
        self._named.update(named)
        self._full = len(named) < len(new)
        if named:
            names = ", ".join(map(shown, named))
            self._warn(f"these columns take no part in the answers: {names} (first on line {line})")
        if self._full:
            self._warn(f"line {line} has further columns that take no part in the answers; they are not named")


def open_source(
    inputs: Inputs | str,
    options: LineOptions = ANY_LINE,
    warn: Warn = lambda sentence: None,
) -> Iterator[Record]:
    """Return a lazy iterator over the input, in order, with a Conversation or a BadLine for each line.

    inputs: the result of find_inputs, or one name for it to expand. warn: called with sentences about unused columns,
    layouts of other tools, empty files beside others, and files that cannot be read to their end. Such a file ends with
    a BadLine. Raises UsageError at once for an input that does not exist, and if the first file is a damaged table.
    While iterating, raises UsageError if all files are empty, or if the first file with content has no line that can be
    read, or is of the wrong kind (see Sniffer).
    """
    found = find_inputs([inputs], warn) if isinstance(inputs, str) else inputs
    rows = {name: rows_in(open_hub(name)) for name in found.files if is_hub(name)}
    _check_first(found.files[0])
    return _with_warnings(_Reader(options, warn).read(found, rows), options, warn)


def _with_warnings(records: Iterator[Record], options: LineOptions, warn: Warn) -> Iterator[Record]:
    """Yield the records unchanged; warn once of each unused column and of each layout of another tool."""
    unused = UnusedColumns(options, warn)
    readings: set[str] = set()
    for record in records:
        if isinstance(record, Conversation):
            unused.note(record.columns, record.line)
            if record.reading is not None and record.reading not in readings and len(readings) < MOST_NAMES:
                readings.add(record.reading)
                warn(f"line {record.line} is read as a conversation: {record.reading}")
        yield record


class _Reader:
    """Reader of the input files, one after the other.

    _before: number of lines in the earlier files. _line: number of the current line in the current file.
    """

    def __init__(self, options: LineOptions, warn: Warn) -> None:
        self._options, self._warn = options, warn
        self._before = self._line = 0

    def read(self, inputs: Inputs, rows: Mapping[str, Iterable[Any]]) -> Iterator[Record]:
        """Yield the records of all files, and open each file when it is reached. rows: dataset name -> its rows."""
        several = len(inputs.files) > 1
        num_records = 0
        for name in inputs.files:
            shown, before = shown_input(name), num_records
            sniffer = Sniffer(shown, has_records_before=num_records > 0)
            for record in self._read_file(name, shown, rows.get(name), sniffer):
                record.file_line = (shown, record.line - self._before) if several else None
                num_records += 1
                yield record
            if several and num_records == before:
                self._warn(f"{shown} is empty")
            self._before, self._line = self._before + self._line, 0
        if not num_records:
            raise UsageError(f"{inputs.shown} is empty: there is nothing to answer")

    def _read_file(self, name: str, shown: str, rows: Iterable[Any] | None, sniffer: Sniffer) -> Iterator[Record]:
        """Yield the records of one file.

        If the file cannot be opened, has no line that can be read, or is of the wrong kind, yield a BadLine; raise
        UsageError instead if no earlier file had records."""
        try:
            if rows is not None:
                yield from self._rows(shown, rows, sniffer, hub_errors())
                return
            with open_stream(name) as stream:
                if (kind := stream.table) is not None:
                    yield from self._rows(shown, rows_in(_table(stream, shown, kind)), sniffer, table_errors())
                else:
                    yield from self._lines(shown, stream, sniffer)
        except (OSError, UsageError) as error:
            message = str(error) if isinstance(error, UsageError) else f"cannot read {shown}: {reason(error)}"
            if not sniffer.has_records_before:
                raise UsageError(message) from None
            yield from sniffer.held
            yield self._cut_short(message)

    def _lines(self, name: str, stream: Stream, sniffer: Sniffer) -> Iterator[Record]:
        head, chunks = look_ahead(stream.chunks(), HEAD_BYTES)
        sniffer.check_head(head)
        separator = separator_of(head.partition(b"\n")[0], self._options)
        if separator is not None:
            rows = read_separated(chunks, separator, MAX_LINE_BYTES)
            yield from self._rows(name, rows, sniffer, (*ERRORS, *BROKEN))
            return
        for number, data in read_lines(name, chunks, MAX_LINE_BYTES):
            if isinstance(data, BrokenEnd):
                yield from sniffer.end()
                yield self._cut_short(data.reason, "invalid_json")
                return
            self._line = number
            line = self._before + number
            if isinstance(data, LongLine):
                limit = f"at most {MAX_LINE_BYTES:,} are read"
                message = f"the line holds {data.num_bytes:,} bytes; {limit}: split it"
                yield from sniffer.take(_bad_line(line, message, "invalid_json"))
            elif data:
                yield from sniffer.take(_with_digest(parse_line(data, line, self._options), data), data)
        yield from sniffer.end()

    def _rows(
        self, name: str, rows: Iterable[Any], sniffer: Sniffer, errors: tuple[type[Exception], ...]
    ) -> Iterator[Record]:
        """Yield the records of the rows.

        After one of `errors` yield a BadLine and end; raise UsageError instead if no row was read."""
        broken = None
        try:
            for number, row in enumerate(rows, start=1):
                self._line = number
                yield from sniffer.take(_read_row(row, self._before + number, self._options))
        except errors as error:
            broken = f"{name} cannot be read further after row {self._line}: {first_line(error)}"
        yield from sniffer.end()
        if broken is not None:
            if not self._line:
                raise UsageError(broken)
            yield self._cut_short(broken)

    def _cut_short(self, message: str, code: ErrorCode = "invalid_request") -> BadLine:
        """Warn that the current file cannot be read further; return the BadLine that replaces the rest of it."""
        self._warn(message)
        self._line += 1
        return _bad_line(self._before + self._line, message, code)


def _check_first(name: str) -> None:
    """Raise UsageError if the first file cannot be read, or is a damaged table. Only a regular file is opened."""
    if is_hub(name):
        return
    check_readable(name)
    if os.path.isfile(name):
        with open_stream(name) as stream:
            if kind := stream.table:
                _table(stream, shown_input(name), kind)


def _table(stream: Stream, name: str, kind: str) -> Iterator[Any]:
    """Return the batches of a table; UsageError if it is damaged or comes from a stream. kind: as in open_table."""
    if not stream.raw.seekable():
        raise UsageError(f"{name} holds a table ({kind}), which cannot be read from a stream; give the file itself")
    try:
        return open_table(stream.raw, kind)
    except table_errors() as error:
        raise UsageError(f"cannot read {name} as {kind}: {first_line(error)}") from None


def _read_row(row: object, line: int, options: LineOptions) -> Record:
    if isinstance(row, RequestError):
        return _bad_line(line, row.message, row.code)
    try:
        return _with_digest(parse_record(row, line, options), ascii(row).encode())
    except RecursionError:
        return _bad_line(line, "the row is nested too deeply")


def _bad_line(line: int, message: str, code: ErrorCode = "invalid_request") -> BadLine:
    """Return a BadLine for unreadable data. Its digest is that of the message."""
    record = BadLine(line, RequestError(code, message, line))
    _with_digest(record, message.encode())
    return record


def _with_digest(record: Record, data: bytes) -> Record:
    """Set the digest of a record to that of its data; return the record."""
    record.digest = xxhash.xxh3_128_hexdigest(data)
    return record
