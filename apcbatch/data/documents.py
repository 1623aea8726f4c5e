"""One JSON document as records: an array of them, or objects over several lines, cut apart without being held.

Must not know: files, formats. Only brackets and strings are looked at; what is between them is checked where a record
is parsed, so a record that is not valid JSON costs that record alone. That is why the cutting is done here: a parser
that streams stops at the first fault, and none of them bounds a record's size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import orjson

from apcbatch.data.files import BROKEN

LOOK_BYTES = 1 << 20  # a first line longer than that is judged by how it begins
_BOM = b"\xef\xbb\xbf"
_ARRAY_OF_OBJECTS = re.compile(rb"\[\s*[{\]]")
_BETWEEN = re.compile(rb"[^\s,]")
_NESTED = re.compile(rb'["{}\[\]]')
_QUOTED = re.compile(rb'["\\]')
_PLAIN_END = re.compile(rb"[\s,\]]")


class DocumentError(Exception):
    """A document that has no end, or something behind it."""


def look_ahead(chunks: Iterator[bytes], least: int = 1, most: int = LOOK_BYTES) -> tuple[bytes, Iterator[bytes]]:
    """What the chunks begin with: at least `least` bytes and the first line, if that ends within `most`, or everything;
    and the same chunks, from the first one on."""
    seen: list[bytes] = []
    failure: Exception | None = None
    num_bytes, is_whole = 0, False
    while not is_whole and num_bytes < most:
        try:
            chunk = next(chunks, b"")
        except BROKEN as error:  # said again where the chunks have come so far
            chunk, failure = b"", error
        seen.append(chunk)
        num_bytes += len(chunk)
        is_whole = not chunk or (num_bytes >= least and b"\n" in chunk)
    return b"".join(seen) if len(seen) > 1 else seen[0], _from_the_first(seen, chunks, failure)


def is_document(chunks: Iterator[bytes]) -> tuple[bool, Iterator[bytes]]:
    """Whether JSON begins here that is not JSON lines; and the same chunks, from the first one on."""
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
    """(number from 1, bytes) of each record; for one over the limit the number of its bytes.

    Raises DocumentError where the array does not end, or more comes after it.
    """
    number, cutter = 0, _Cutter(limit)
    for chunk in chunks:
        for record in cutter.cut(chunk):
            number += 1
            yield number, record
    last = cutter.end()
    if last is not None:
        yield number + 1, last


class _Cutter:
    """Cuts chunks into records. held: the running record so far, while it is within the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._is_array: bool | None = None
        self._closed = self._in_record = self._in_string = self._escaped = False
        self._depth = 0
        self._held: list[bytes] = []
        self._num_bytes = 0

    def cut(self, chunk: bytes) -> Iterator[bytes | int]:
        """The records that end in this chunk."""
        if self._is_array is None:
            chunk = chunk.removeprefix(_BOM)
        position = begin = 0
        while True:
            if not self._in_record:
                begin = position = self._find_record(chunk, position)
                if position < 0:
                    return
                position += not self._opens(chunk, position)  # a stray bracket or a word has at least one character
            end = self._find_end(chunk, position)
            self._hold(chunk[begin:] if end < 0 else chunk[begin:end])
            if end < 0:
                return
            yield self._take()
            position = end

    def end(self) -> bytes | int | None:
        """The record that ends with the document, if one does."""
        if self._is_array and not self._closed:
            raise DocumentError("the array has no end")
        if not self._in_record:
            return None
        if self._depth or self._in_string:
            raise DocumentError("the last record has no end")
        return self._take()

    def _find_record(self, chunk: bytes, position: int) -> int:
        """Where the next record begins; -1 if not in this chunk."""
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
        """Where the running record ends; -1 if not in this chunk."""
        if self._escaped and position < len(chunk):
            self._escaped, position = False, position + 1
        while position < len(chunk):
            is_plain = not self._in_string and not self._depth and not self._opens(chunk, position)
            if is_plain:  # a number, a word
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
    """Whether the data begin a document; None if more must be seen. JSON lines have a whole value on the first line."""
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
    return data.removeprefix(_BOM).lstrip()


def _is_json(data: bytes) -> bool:
    try:
        orjson.loads(data)
    except ValueError:
        return False
    return True


def _from_the_first(seen: list[bytes], chunks: Iterator[bytes], failure: Exception | None) -> Iterator[bytes]:
    """The chunks that were looked at, each let go as it is used, and the others."""
    while seen:
        yield seen.pop(0)
    if failure is not None:
        raise failure
    yield from chunks
