"""Recognise inputs of the wrong kind by their first bytes or first hundred lines, and guess what they are.

Invariant: bad lines are buffered only until one line has a known key; at most MOST_HELD of them.
"""

from __future__ import annotations

import re

from apcbatch.data.checks import shown_keys
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.input.delimited import header_of
from apcbatch.data.input.files import COMPRESSED, TABLES
from apcbatch.errors import RequestError, UsageError

MOST_HELD = 100
HEAD_BYTES = 512  # number of first bytes that are compared with _MAGIC
_TAR_MARK = 257  # offset of b"ustar"
_MAGIC = (
    *((magic, "compressed twice; unpack it once") for magic in COMPRESSED),
    *((magic, f"a compressed {kind} file; unpack it") for magic, kind in TABLES.items()),
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (b"Rar!\x1a\x07", "a rar archive; unpack it first"),
    (b"\x04\x22\x4d\x18", "compressed with lz4; unpack it first"),
    (b"\xff\xfe", "text in UTF-16; convert it to UTF-8, as iconv -f UTF-16 -t UTF-8 does"),
    (b"\xfe\xff", "text in UTF-16; convert it to UTF-8, as iconv -f UTF-16 -t UTF-8 does"),
    (b"GGUF", "a GGUF file, which holds a model; INPUT is the conversations"),
    (b"SQLite format 3\0", "an SQLite database; write the conversations of its table as JSON lines"),
    (b"Obj\x01", "an Avro file; write its records as JSON lines or parquet"),
    (b"ORC", "an ORC table; write it as parquet"),
    (b"\x89HDF", "an HDF5 file; write its records as JSON lines or parquet"),
    (b"\x93NUMPY", "a NumPy array; INPUT is conversations as JSON lines"),
    (b"%PDF", "a PDF document; INPUT is conversations as JSON lines"),
)
_VARYING = re.compile(r'"(?:[^"\\]|\\.)*"|\d+')
_YAML = re.compile(rb"---\s*$|(-\s+)?[\w\"' -]{1,64}:(\s|$)|-\s+\S")


class Sniffer:
    """Detector of a wrong kind of input, fed with the records of one file.

    has_records_before: an earlier file had records. If so, and this file ends with fewer than MOST_HELD buffered lines,
    each of them gets an error record; otherwise the file is of the wrong kind. held: the buffered records.
    """

    def __init__(self, name: str, has_records_before: bool) -> None:
        self._name, self.has_records_before = name, has_records_before
        self.held: list[BadLine] = []
        self._is_known = False  # a line was a JSON object with a known key
        self._first: tuple[bytes, RequestError] | None = None
        self._num_alike = 0

    def check_head(self, head: bytes) -> None:
        """Raise UsageError if the first bytes, `head`, are those of another kind of file."""
        what = next((what for magic, what in _MAGIC if head.startswith(magic)), None)
        if head[_TAR_MARK : _TAR_MARK + 5] == b"ustar":
            what = "a tar archive; unpack it first"
        if what is not None:
            raise UsageError(f"{self._name} cannot be read as conversations: it seems to be {what}")

    def take(self, record: Conversation | BadLine, data: bytes = b"") -> list[Conversation | BadLine]:
        """Take the next record; return the buffered records and this one, or an empty list while they are buffered.

        data: the line's bytes; empty for a row of a table. Raises UsageError if none of the first MOST_HELD lines has
        a known key, and if the first MOST_HELD + 1 lines have known keys and all fail in the same way.
        """
        if self._is_known:
            self._watch(record)
            return [record]
        if isinstance(record, BadLine) and record.source_format is None:
            self._first = self._first or (data, record.error)
            record.record = None
            self.held.append(record)
            if len(self.held) == MOST_HELD:
                raise self._wrong_kind()
            return []
        self._is_known = True
        if self.held:
            self._num_alike = -1
        self._watch(record)
        return [*self._release(), record]

    def end(self) -> list[BadLine]:
        """Return the records still buffered at the end of the file.

        Raises UsageError if there are any and no earlier file had records."""
        if self.held and not self.has_records_before:
            raise self._wrong_kind()
        return self._release()

    def _release(self) -> list[BadLine]:
        held, self.held = self.held, []
        return held

    def _watch(self, record: Conversation | BadLine) -> None:
        """Count the first lines with a known key while all fail in the same way.

        The count becomes -1, and stays so, after a line that is valid or fails in another way.
        Raises UsageError after more than MOST_HELD such lines."""
        if self._num_alike < 0:
            return
        if isinstance(record, Conversation) or (self._first and _kind(record.error) != _kind(self._first[1])):
            self._num_alike = -1
            return
        self._first = self._first or (b"", record.error)
        self._num_alike += 1
        if self._num_alike > MOST_HELD:
            raise UsageError(
                f"{self._name}: the first {MOST_HELD} lines all fail in the same way ({self._first[1].message}); "
                "correct that in its lines"
            )

    def _wrong_kind(self) -> UsageError:
        assert self.held and self._first
        number, (first, reason) = len(self.held), self._first
        which = f"the first {number} lines" if number == MOST_HELD else f"its {number} lines"
        none = f"none of {which} is" if number > 1 else "its only line is not"
        seems = f"; it seems to be {what}" if (what := _guess(first)) else ""
        return UsageError(
            f"{self._name}: {none} a JSON object with the keys of a conversation or a request "
            f"({reason.message}){seems}; the formats are in docs/reference/formats.md"
        )


def _kind(error: RequestError) -> tuple[str, str]:
    """Return the code of an error, and its message without numbers and quoted words. Errors of equal kinds
    are alike."""
    return (error.code, _VARYING.sub("", error.message))


def _guess(first: bytes) -> str:
    """Guess from the first line what a file is; return that and a remedy, as the end of a sentence.

    Return an empty text if nothing is to be added to the line's own error."""
    begin = first.lstrip()
    if b"\0" in first:
        return "binary data, or text in UTF-16; expected JSON lines in UTF-8"
    if begin.startswith((b"{", b"[")) or not begin:
        return ""
    if begin.startswith(b"<"):
        return "HTML or XML; expected JSON lines"
    if _YAML.match(begin):
        return "YAML; convert it to JSON lines"
    if b"\t" not in first and b"," not in first:
        return "text; expected JSON lines"
    name = "tab-separated values (TSV)" if b"\t" in first else "comma-separated values (CSV)"
    found = header_of(first)
    columns = shown_keys(found[1]) if found is not None else "no text"
    return (
        f"a table of {name} whose header ({columns}) names no column of conversations; give --prompt-column, or "
        "--messages-column, with one of its columns"
    )
