"""Split a stream of bytes into numbered lines, or into the numbered records of one JSON document.

Invariants: at most one line or record and one chunk are in memory; at the beginning also the bytes that tell a JSON
document from JSON lines, about LOOK_BYTES. A line or record over the size limit is reported and skipped, and its bytes
are not kept. Numbers count from 1, and blank lines count too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from apcbatch.data.input.files import BROKEN, reason
from apcbatch.errors import UsageError

MAX_LINE_BYTES = 64 * 2**20
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LongLine:
    """Placeholder for a line over the size limit. num_bytes: its size."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class BrokenEnd:
    """Placeholder for the rest of a file after a read error. reason: a sentence."""

    reason: str


Line = bytes | LongLine | BrokenEnd


def read_lines(name: str, chunks: Iterator[bytes], max_line_bytes: int) -> Iterator[tuple[int, Line]]:
    """Yield (number, line without line feed) for every line: b"" for a blank one, LongLine for one over max_line_bytes.

    name: name of the input, for error sentences. For a JSON document, such as an array, yield its records instead of
    lines. After a read error, yield a BrokenEnd after the last complete line; UsageError if there is no complete line.
    """
    number, unit = 0, "line"
    try:
        whole, chunks = is_document(chunks)
        unit = "record" if whole else unit
        split = split_document if whole else split_lines
        for number, data in split(chunks, max_line_bytes):
            yield number, LongLine(data) if isinstance(data, int) else data
    except (*BROKEN, DocumentError) as error:
        place = f"after {unit} {number}" if number else f"before its first {unit}"
        sentence = f"{name} cannot be read further {place}: {reason(error)}; is the file complete?"
        if not number:
            raise UsageError(sentence) from None
        yield number + 1, BrokenEnd(sentence)


def split_lines(chunks: Iterator[bytes], limit: int, keep_blank: bool = False) -> Iterator[tuple[int, bytes | int]]:
    """Yield (number, line) without line feed and byte order mark, or (number, size in bytes) for a line over the limit.

    keep_blank: return a line of whitespace as it is; otherwise it becomes b""."""
    line = 0
    held: list[bytes] = []  # the pieces of the current line, while it is within the limit
    held_bytes = 0
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            line += 1
            num_bytes = held_bytes + len(piece)
            yield line, num_bytes if num_bytes > limit else _join(held, piece, line, keep_blank)
            held, held_bytes = [], 0
        held_bytes += len(rest)
        if held_bytes > limit:
            held = []
        elif rest:
            held.append(rest)
    if held_bytes:
        yield line + 1, held_bytes if held_bytes > limit else _join(held, b"", line + 1, keep_blank)


def _join(held: list[bytes], piece: bytes, line: int, keep_blank: bool) -> bytes:
    data = b"".join([*held, piece]) if held else piece
    if line == 1 or not keep_blank:  # `cat` of several files puts marks inside
        data = data.removeprefix(BOM)
    return data if keep_blank or data.strip() else b""


LOOK_BYTES = 1 << 20  # bytes inspected to tell a document from JSON lines; a longer first line is judged by these
_ARRAY_OF_OBJECTS = re.compile(rb"\[\s*[{\]]")
_BETWEEN = re.compile(rb"[^\s,]")
_NESTED = re.compile(rb'["{}\[\]]')
_QUOTED = re.compile(rb'["\\]')
_PLAIN_END = re.compile(rb"[\s,\]]")


class DocumentError(Exception):
    """A JSON document that does not end, or is followed by more data."""


def look_ahead(chunks: Iterator[bytes], least: int) -> tuple[bytes, Iterator[bytes]]:
    """Read the beginning of the chunks; return (beginning, iterator over all chunks).

    The beginning has at least `least` bytes and the whole first line, unless the chunks end before that. Reading stops
    at the chunk with which it has LOOK_BYTES, even if the first line is longer."""
    seen: list[bytes] = []
    failure: Exception | None = None
    num_bytes, is_whole = 0, False
    while not is_whole and num_bytes < LOOK_BYTES:
        try:
            chunk = next(chunks, b"")
        except BROKEN as error:  # _all_chunks raises it after the chunks that were read before it
            chunk, failure = b"", error
        seen.append(chunk)
        num_bytes += len(chunk)
        is_whole = not chunk or (num_bytes >= least and b"\n" in chunk)
    return b"".join(seen) if len(seen) > 1 else seen[0], _all_chunks(seen, chunks, failure)


def is_document(chunks: Iterator[bytes]) -> tuple[bool, Iterator[bytes]]:
    """Tell a JSON document from JSON lines; return (is a document, iterator over all chunks)."""
    judged: bool | None = None
    num_bytes = 0
    while judged is None:
        data, chunks = look_ahead(chunks, num_bytes + 1)
        judged = _judge(data[:LOOK_BYTES], ended=len(data) <= num_bytes)
        if judged is None and len(data) >= LOOK_BYTES:
            judged = _ARRAY_OF_OBJECTS.match(_body(data[:LOOK_BYTES])) is not None
        num_bytes = len(data)
    return judged, chunks


def split_document(chunks: Iterator[bytes], limit: int) -> Iterator[tuple[int, bytes | int]]:
    """Yield (number from 1, record) for each record of a document, or (number, size in bytes) for one over the limit.

    Raises DocumentError for an array or a last record that does not end, and for data after the array.
    """
    number, splitter = 0, _RecordSplitter(limit)
    for chunk in chunks:
        for record in splitter.split(chunk):
            number += 1
            yield number, record
    last = splitter.end()
    if last is not None:
        yield number + 1, last


class _RecordSplitter:
    """Splitter of a document's chunks into records, by a scan for brackets and quotes.

    _held: pieces of the current record while it is within the limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._is_array: bool | None = None
        self._closed = self._in_record = self._in_string = self._escaped = False
        self._depth = 0
        self._held: list[bytes] = []
        self._num_bytes = 0

    def split(self, chunk: bytes) -> Iterator[bytes | int]:
        """Yield the records that end in this chunk; for a record over the limit, its size in bytes."""
        if self._is_array is None:
            chunk = chunk.removeprefix(BOM)
        position = begin = 0
        while True:
            if not self._in_record:
                begin = position = self._find_record(chunk, position)
                if position < 0:
                    return
                # skip a first character that opens nothing, since _find_end would take a stray `]` for the end
                position += not self._opens(chunk, position)
            end = self._find_end(chunk, position)
            self._hold(chunk[begin:] if end < 0 else chunk[begin:end])
            if end < 0:
                return
            yield self._take()
            position = end

    def end(self) -> bytes | int | None:
        """Return the record that ends with the document, or None. Raises DocumentError for an open array or record."""
        if self._is_array and not self._closed:
            raise DocumentError("the array has no end")
        if not self._in_record:
            return None
        if self._depth or self._in_string:
            raise DocumentError("the last record has no end")
        return self._take()

    def _find_record(self, chunk: bytes, position: int) -> int:
        """Return the index where the next record begins; -1 if none begins in this chunk."""
        while found := _BETWEEN.search(chunk, position):
            position = found.start()
            if self._closed:
                raise DocumentError("there is more behind the end of the array")
            if self._is_array is None:
                self._is_array = found[0] == b"["
                if self._is_array:
                    position += 1
                    continue
            if self._is_array and found[0] == b"]":
                self._closed = True
                position += 1
                continue
            self._in_record = True
            return position
        return -1

    def _find_end(self, chunk: bytes, position: int) -> int:
        """Return the index after the current record's end; -1 if it does not end in this chunk."""
        if self._escaped and position < len(chunk):
            self._escaped, position = False, position + 1
        while position < len(chunk):
            is_plain = not self._in_string and not self._depth and not self._opens(chunk, position)
            if is_plain:  # a record without brackets and quotes: a number, a word
                found = _PLAIN_END.search(chunk, position)
                return found.start() if found else -1
            found = (_QUOTED if self._in_string else _NESTED).search(chunk, position)
            if found is None:
                return -1
            position = found.end()
            mark = found[0]
            if mark == b"\\":
                self._escaped = position == len(chunk)
                position += 1
                continue
            if mark == b'"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in b"{[" else -1
            if self._depth <= 0 and not self._in_string:
                self._depth = 0
                return position
        return -1

    def _opens(self, chunk: bytes, position: int) -> bool:
        return chunk[position : position + 1] in (b'"', b"{", b"[", b"}")

    def _hold(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > self._limit:
            self._held = []
        else:
            self._held.append(piece)

    def _take(self) -> bytes | int:
        record = self._num_bytes if self._num_bytes > self._limit else b"".join(self._held)
        self._held, self._num_bytes, self._in_record = [], 0, False
        return record


def _judge(data: bytes, ended: bool) -> bool | None:
    """Return whether data is the beginning of a document; None if more data is needed.

    ended: data is the whole input. In JSON lines the first line is a complete JSON value; in a document the first line
    usually has only a part of one."""
    body = _body(data)
    if body[:1] not in (b"[", b"{"):
        return None if not body and not ended else False
    first, newline, rest = body.partition(b"\n")
    if not newline and not ended:
        return None
    rest = rest.lstrip()
    if _is_json(first):
        if body[:1] == b"{" or rest:
            return False
        return _ARRAY_OF_OBJECTS.match(body) is not None if ended else None
    if body[:1] == b"[":
        return None if first.strip() == b"[" and not rest and not ended else bool(_ARRAY_OF_OBJECTS.match(body))
    if first.rstrip()[-1:] not in (b"{", b"[", b","):
        return False
    second, newline, _ = rest.partition(b"\n")
    if not newline and not ended:
        return None
    return bool(second) and not _is_json(second)


def _body(data: bytes) -> bytes:
    return data.removeprefix(BOM).lstrip()


def _is_json(data: bytes) -> bool:
    try:
        orjson.loads(data)
    except ValueError:
        return False
    return True


def _all_chunks(seen: list[bytes], chunks: Iterator[bytes], failure: Exception | None) -> Iterator[bytes]:
    """Yield the inspected chunks, each freed when it is taken, then the others.

    failure: error to raise after `seen`, or None."""
    while seen:
        yield seen.pop(0)
    if failure is not None:
        raise failure
    yield from chunks
