"""Inputs of the wrong kind: recognised by their first hundred lines, with a guess at what they are.

Must not know: how lines are read, what a conversation holds.
"""

from __future__ import annotations

import re

from apcbatch.errors import RequestError, UsageError

PATIENCE = 100
_MAGIC = (
    (b"\x1f\x8b", "compressed twice; unpack it once"),
    (b"\x28\xb5\x2f\xfd", "compressed twice; unpack it once"),
    (b"BZh", "compressed twice; unpack it once"),
    (b"\xfd7zXZ\x00", "compressed twice; unpack it once"),
    (b"PAR1", "a compressed parquet file; unpack it"),
    (b"ARROW1", "a compressed arrow file; unpack it"),
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"\xff\xfe", "text in UTF-16; convert it to UTF-8"),
    (b"\xfe\xff", "text in UTF-16; convert it to UTF-8"),
)
_VARYING = re.compile(r'"(?:[^"\\]|\\.)*"|\d+')


class Faults:
    """Watches the beginning of one input."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._first: tuple[bytes, RequestError] | None = None
        self._num_lines = 0
        self._watching = True

    def note(self, error: RequestError | None, data: bytes = b"", has_format: bool = False) -> None:
        """Note a line that failed (error) or can be used (None).

        data: the line itself, if there is one. has_format: its keys are those of a format, so it is of the right kind.
        Raises UsageError after PATIENCE lines that all failed in the same way, before the next such line is used.
        """
        if not self._watching:
            return
        if error is None or (self._first is not None and _kind(error) != _kind(self._first[1])):
            self._watching = False
            return
        self._first = self._first or (data, error)
        self._num_lines += 1
        if self._num_lines > PATIENCE:
            first, reason = self._first
            what = "correct that in its lines" if has_format else f"it seems to be {_seems_to_be(first)}"
            raise UsageError(
                f"{self._spec}: the first {PATIENCE} lines all fail in the same way ({reason.message}); {what}"
            )


def _kind(error: RequestError) -> tuple[str, str]:
    """What equal kinds of errors have in common: neither the numbers nor the words that they quote."""
    return (error.code, "" if error.code == "invalid_json" else _VARYING.sub("", error.message))


def _seems_to_be(first: bytes) -> str:
    """What a file seems to be, from a first line that is no request, and what to do about it."""
    for magic, what in _MAGIC:
        if first.startswith(magic):
            return what
    if b"\0" in first:
        return "binary data, or text in UTF-16; expected JSON lines in UTF-8"
    if first.lstrip().startswith((b"{", b"[")):
        return "JSON lines of another kind; see the formats of --format"
    if first.count(b",") or first.count(b"\t"):
        return "a table of comma- or tab-separated values; expected JSON lines"
    return "something else than conversations or requests; see the formats of --format"
