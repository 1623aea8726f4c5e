"""The lines of a file, a pipe or stdin, as numbered bytes: plain, gzip or zstd by suffix, each of bounded size.

Must not know: JSON, records. Invariants: never more than one line (plus one chunk) is held; a line over the limit is
reported and skipped without being held; lines count from 1, and blank ones count too.
"""

from __future__ import annotations

import gzip
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import cast

import zstandard

from apcbatch.errors import UsageError
from apcbatch.regular_files import kind_of

STDIN = "-"
DEFAULT_MAX_LINE_BYTES = 64 * 2**20
_CHUNK_BYTES = 256 * 2**10
# One call may decompress its input to up to 32,768 times the size, so it gets little at a time.
_ZSTD_CHUNK_BYTES = 512
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LongLine:
    """Takes the place of a line over the limit."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class BrokenEnd:
    """Takes the place of everything after the point where the file becomes unreadable. reason: a sentence."""

    reason: str


Line = bytes | LongLine | BrokenEnd


def check_readable(spec: str) -> None:
    """Raise UsageError if the file is absent, a folder or not permitted. Does not open it: it may be a pipe."""
    if spec == STDIN:
        if sys.stdin is None:
            raise UsageError("cannot read stdin: it is closed; pipe the lines in, or give a file")
        return
    try:
        mode = os.stat(spec).st_mode
    except OSError as error:
        raise UsageError(f"cannot read {spec}: {_reason(error)}; give a file, - for stdin, or hf:org/name") from None
    except ValueError:
        raise UsageError(f"cannot read {spec!r}: it is not a file name") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"cannot read {spec}: it is a folder; give a file of JSON lines, parquet or arrow")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        raise UsageError(f"cannot read {spec}: it is {kind_of(mode)}; give a file, a pipe, or - for stdin")
    if not os.access(spec, os.R_OK):
        raise UsageError(f"cannot read {spec}: permission denied; check its owner and mode")


def read_lines(spec: str, max_line_bytes: int = DEFAULT_MAX_LINE_BYTES) -> Iterator[tuple[int, Line]]:
    """(line number, line without its end) for every line that is not blank; LongLine for one over max_line_bytes.

    A file that cannot be read further ends with a BrokenEnd after the last complete line. Raises UsageError for a file
    whose first line already cannot be read.
    """
    check_readable(spec)
    line = 0
    try:
        for line, data in _split(_chunks(spec), max_line_bytes):
            if isinstance(data, LongLine) or data.strip():
                yield line, data
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        place = f"after line {line}" if line else "before its first line"
        reason = f"{spec} cannot be read further {place}: {_reason(error)}; is the file complete?"
        if not line:
            raise UsageError(reason) from None
        yield line + 1, BrokenEnd(reason)


def _reason(error: Exception) -> str:
    """What went wrong, without errno and file name."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = text.strip().rstrip(".") or type(error).__name__
    return text[0].lower() + text[1:]


def _split(chunks: Iterator[bytes], limit: int) -> Iterator[tuple[int, bytes | LongLine]]:
    """The numbered lines of a stream of chunks, without line ends and without a byte order mark."""
    line = 0
    held: list[bytes] = []  # the pieces of the running line, while it is within the limit
    held_bytes = 0
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            line += 1
            num_bytes = held_bytes + len(piece)
            yield line, LongLine(num_bytes) if num_bytes > limit else _join(held, piece, line)
            held, held_bytes = [], 0
        held_bytes += len(rest)
        if held_bytes > limit:
            held = []
        elif rest:
            held.append(rest)
    if held_bytes:
        yield line + 1, LongLine(held_bytes) if held_bytes > limit else _join(held, b"", line + 1)


def _join(held: list[bytes], piece: bytes, line: int) -> bytes:
    data = b"".join([*held, piece]) if held else piece
    return data.removeprefix(_BOM) if line == 1 else data


def _chunks(spec: str) -> Iterator[bytes]:
    """The decompressed bytes, as they come."""
    with _open(spec) as raw:
        suffix = Path(spec).suffix.lower()
        if suffix == ".zst":
            yield from _zstd_chunks(raw)
        elif suffix == ".gz":
            with closing(gzip.GzipFile(fileobj=raw)) as stream:
                yield from iter(lambda: stream.read1(_CHUNK_BYTES), b"")
        else:
            yield from iter(lambda: raw.read1(_CHUNK_BYTES), b"")


def _open(spec: str) -> AbstractContextManager[BufferedReader]:
    return nullcontext(cast(BufferedReader, sys.stdin.buffer)) if spec == STDIN else open(spec, "rb")


def _zstd_chunks(raw: BufferedReader) -> Iterator[bytes]:
    """Every frame of a zstd stream; EOFError if the last one is incomplete."""
    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    data, begun = raw.read1(_ZSTD_CHUNK_BYTES), False
    while data:
        out = frame.decompress(data)
        begun = True
        if out:
            yield out
        if frame.eof:
            data, begun, frame = frame.unused_data, False, decompressor.decompressobj()
        else:
            data = b""
        data = data or raw.read1(_ZSTD_CHUNK_BYTES)
    if begun:
        raise EOFError("the compressed stream ends in the middle of a frame")
