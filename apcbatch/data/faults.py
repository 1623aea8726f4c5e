"""Inputs of the wrong kind: recognised by their first bytes, or by their first hundred lines, with a guess at what they
are.

Must not know: how lines are read, what a conversation holds. Invariant: a record is held back only until one line shows
that the input is of the right kind; at most PATIENCE are held.
"""

from __future__ import annotations

import re

from apcbatch.data.checks import shown
from apcbatch.data.records import BadLine, Conversation
from apcbatch.data.separated import header_of
from apcbatch.errors import RequestError, UsageError

PATIENCE = 100
MOST_NAMED = 8  # columns
HEAD_BYTES = 512  # what of an input is looked at first
_TAR_MARK = 257  # where b"ustar" stands
_MAGIC = (
    (b"\x1f\x8b", "compressed twice; unpack it once"),
    (b"\x28\xb5\x2f\xfd", "compressed twice; unpack it once"),
    (b"BZh", "compressed twice; unpack it once"),
    (b"\xfd7zXZ\x00", "compressed twice; unpack it once"),
    (b"PAR1", "a compressed parquet file; unpack it"),
    (b"ARROW1", "a compressed arrow file; unpack it"),
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


class Faults:
    """Watches the beginning of one file of INPUT. follows: there are records of files before it, so that its lines are
    answered one by one if it ends before PATIENCE. held: the records that were taken and not passed on."""

    def __init__(self, spec: str, follows: bool = False) -> None:
        self._spec, self.follows = spec, follows
        self.held: list[BadLine] = []
        self._is_known = False  # a line was a JSON object with a known key
        self._first: tuple[bytes, RequestError] | None = None
        self._num_alike = 0

    def check_head(self, head: bytes) -> None:
        """Raise UsageError for an input whose first bytes say that it cannot be lines of JSON."""
        what = next((what for magic, what in _MAGIC if head.startswith(magic)), None)
        if head[_TAR_MARK : _TAR_MARK + 5] == b"ustar":
            what = "a tar archive; unpack it first"
        if what is not None:
            raise UsageError(f"{self._spec} cannot be read as conversations: it seems to be {what}")

    def take(self, record: Conversation | BadLine, data: bytes = b"") -> list[Conversation | BadLine]:
        """The records that are passed on now: this one, behind those that were held back, or none yet.

        data: the line itself, if there is one. Raises UsageError if none of the first PATIENCE lines has a known key,
        and after PATIENCE lines with one that all failed in the same way.
        """
        if self._is_known:
            self._watch(record)
            return [record]
        if isinstance(record, BadLine) and record.source_format is None:
            self._first = self._first or (data, record.error)
            record.record = None
            self.held.append(record)
            if len(self.held) == PATIENCE:
                raise self._wrong_kind()
            return []
        self._is_known = True
        if self.held:
            self._num_alike = -1
        self._watch(record)
        return [*self._release(), record]

    def end(self) -> list[BadLine]:
        """The records that are held when the file ends. Raises UsageError if there are any and no file before it has
        one."""
        if self.held and not self.follows:
            raise self._wrong_kind()
        return self._release()

    def _release(self) -> list[BadLine]:
        held, self.held = self.held, []
        return held

    def _watch(self, record: Conversation | BadLine) -> None:
        """Count lines with a known key that all fail in the same way, from the first one on; -1 where one did not."""
        if self._num_alike < 0:
            return
        if isinstance(record, Conversation) or (self._first and _kind(record.error) != _kind(self._first[1])):
            self._num_alike = -1
            return
        self._first = self._first or (b"", record.error)
        self._num_alike += 1
        if self._num_alike > PATIENCE:
            reason = self._first[1].message
            raise UsageError(
                f"{self._spec}: the first {PATIENCE} lines all fail in the same way ({reason}); "
                "correct that in its lines"
            )

    def _wrong_kind(self) -> UsageError:
        assert self.held and self._first
        number, (first, reason) = len(self.held), self._first
        which = f"the first {number} lines" if number == PATIENCE else f"its {number} lines"
        none = f"none of {which} is" if number > 1 else "its only line is not"
        seems = f"; it seems to be {what}" if (what := _seems_to_be(first)) else ""
        return UsageError(
            f"{self._spec}: {none} a JSON object with the keys of a conversation or a request "
            f"({reason.message}){seems}; the formats are in docs/formats.md"
        )


def _kind(error: RequestError) -> tuple[str, str]:
    """What equal kinds of errors have in common: neither the numbers nor the words that they quote."""
    return (error.code, _VARYING.sub("", error.message))


def _seems_to_be(first: bytes) -> str:
    """What a file seems to be, from a first line that is no request, and what to do about it; empty where the reason
    says it."""
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
    columns = ", ".join(map(shown, found[1][:MOST_NAMED])) if found is not None else "no text"
    return (
        f"a table of {name} whose header ({columns}) names no column of conversations; give --prompt-column, or "
        "--messages-column, with one of its columns"
    )
