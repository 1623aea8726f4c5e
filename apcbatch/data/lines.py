"""What a stream of bytes falls into: numbered lines, or the numbered records of one JSON document; of bounded size.

Must not know: files, formats. Invariants: never more than one line or record (plus one chunk) is held; one over the
limit is reported and skipped without being held; lines count from 1, and blank ones count too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from apcbatch.data.documents import DocumentError, is_document, split_document
from apcbatch.data.files import BROKEN, reason
from apcbatch.errors import UsageError

DEFAULT_MAX_LINE_BYTES = 64 * 2**20
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LongLine:
    """Takes the place of a line over the limit."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class BrokenEnd:
    """Takes the place of everything after the point where the file becomes unreadable. reason: a sentence."""

    reason: str


Line = bytes | LongLine | BrokenEnd


def read_lines(
    name: str, chunks: Iterator[bytes], max_line_bytes: int = DEFAULT_MAX_LINE_BYTES
) -> Iterator[tuple[int, Line]]:
    """(line number, line without its end) for every line, the blank ones as b""; LongLine for one over max_line_bytes.

    For a JSON document, such as an array, its records take the place of the lines. What cannot be read further ends
    with a BrokenEnd after the last complete line. Raises UsageError if the first line already cannot be read.
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
    """The numbered lines, without line ends and without a byte order mark; for one over the limit its bytes' number.
    keep_blank: keep the blanks of lines that hold nothing else."""
    line = 0
    held: list[bytes] = []  # the pieces of the running line, while it is within the limit
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
    if line == 1:
        data = data.removeprefix(BOM)
    return data if keep_blank or data.strip() else b""
