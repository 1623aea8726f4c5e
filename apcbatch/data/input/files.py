"""Open one file of INPUT (a path, stdin or an address) as bytes, and decompress it.

Invariants: compression and tables are recognised by the first bytes, never by the name. A stream is read ahead only
until these bytes decide. Data is decompressed in small pieces, so that a compression bomb does not fill the memory.
"""

from __future__ import annotations

import bz2
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import zstandard

from apcbatch.address import is_address, open_filesystem, reason_of, refuse, shown_address
from apcbatch.errors import UsageError
from apcbatch.regular_files import kind_of

STDIN = "-"
CHUNK_BYTES = 256 * 2**10
XZ_MEMORY_BYTES = 256 * 2**20
TABLES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
# First bytes -> (decompressor, compressed bytes given to it at a time). Decompression by gzip makes data up to 1,032
# times as large, by zstd up to 32,768 times; bzip2 and xz take a limit on their output.
COMPRESSED: dict[bytes, tuple[Callable[[], Any], int]] = {
    b"\x1f\x8b": (lambda: zlib.decompressobj(wbits=31), 4 * 2**10),
    b"\x28\xb5\x2f\xfd": (lambda: zstandard.ZstdDecompressor().decompressobj(), 512),
    b"BZh": (bz2.BZ2Decompressor, CHUNK_BYTES),
    b"\xfd7zXZ\0": (lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY_BYTES), CHUNK_BYTES),
}
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


class Stream:
    """An open file whose first bytes can be inspected before it is read. raw: the file itself."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw = raw
        self._read: Callable[[int], bytes] = getattr(raw, "read1", raw.read)
        self._head = b""

    @property
    def table(self) -> str | None:
        """Detect a table by its magic bytes: `parquet`, `arrow`, or None."""
        return next((kind for magic, kind in TABLES.items() if self._begins_with(magic)), None)

    def chunks(self) -> Iterator[bytes]:
        """Return an iterator over the decompressed content. It raises one of BROKEN after a read error."""
        for magic, (make, size) in COMPRESSED.items():
            if self._begins_with(magic):
                return _decompressed(self._pieces(size), make)
        return self._pieces(CHUNK_BYTES)

    def _begins_with(self, magic: bytes) -> bool:
        """Return whether the file begins with these bytes. Read more only while this is undecided: a pipe may be
        slow."""
        while len(self._head) < len(magic) and magic.startswith(self._head):
            more = self._read(CHUNK_BYTES)
            if not more:
                break
            self._head += more
        return self._head.startswith(magic)

    def _pieces(self, size: int) -> Iterator[bytes]:
        data, self._head = self._head, b""
        while data := data or self._read(CHUNK_BYTES):
            for begin in range(0, len(data), size):
                yield data[begin : begin + size]
            data = b""


def shown_input(name: str) -> str:
    """Return a name of INPUT for sentences and records: addresses without secrets, bytes outside UTF-8 escaped."""
    if name == STDIN:
        return "stdin"
    return os.fsencode(shown_address(name)).decode("utf-8", "backslashreplace")


def check_readable(name: str) -> None:
    """Raise UsageError if a file is absent, a folder or not readable. The file is not opened, since it may be a
    pipe."""
    if name == STDIN:
        if sys.stdin is None:
            raise UsageError("cannot read stdin: it is closed; pipe the lines in, or give a file")
        return
    if is_address(name):
        return
    try:
        mode = os.stat(name).st_mode
    except OSError as error:
        raise UsageError(f"cannot read {name}: {reason(error)}; give a file, - for stdin, or hf:org/name") from None
    except ValueError:
        raise UsageError(f"cannot read {name!r}: it is not a file name") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"cannot read {name}: it is a folder; give a file of JSON lines, parquet or arrow")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        raise UsageError(f"cannot read {name}: it is {kind_of(mode)}; give a file, a pipe, or - for stdin")
    if not os.access(name, os.R_OK):
        raise UsageError(f"cannot read {name}: permission denied; check its owner and mode")


@contextmanager
def open_stream(name: str) -> Iterator[Stream]:
    """Open a file, stdin or an address. Raises OSError for a path that cannot be opened, UsageError for an address."""
    if name == STDIN:
        yield Stream(cast(BinaryIO, sys.stdin.buffer))
    elif is_address(name):
        system, path = open_filesystem(name)
        try:
            raw = system.open(path, "rb")
        except Exception as error:  # the package of the file system may raise any exception
            refuse(name, "read", error)
        with raw:
            yield Stream(_Remote(raw, name))  # type: ignore[arg-type]
    else:
        with open(name, "rb") as raw:
            yield Stream(raw)


def reason(error: BaseException) -> str:
    """Return the message of an error as a clause, without errno and file name."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = text.strip().rstrip(".") or type(error).__name__
    return text[0].lower() + text[1:]


class _Remote:
    """A file at an address. Any exception while reading becomes an OSError whose message has no secrets."""

    def __init__(self, raw: Any, name: str) -> None:
        self._raw, self._name = raw, name

    def read(self, size: int = -1) -> bytes:
        try:
            return cast(bytes, self._raw.read(size))
        except Exception as error:  # the package of the file system may raise any exception
            raise OSError(reason_of(error, self._name)) from None

    def __getattr__(self, name: str) -> Any:
        if name == "read1":
            raise AttributeError(name)
        return getattr(self._raw, name)


def _decompressed(pieces: Iterator[bytes], make: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the content of concatenated compressed streams; EOFError if the last one is incomplete."""
    stream = make()
    begun = False
    for piece in pieces:
        data = piece
        while data := data if begun else data.lstrip(b"\0"):  # zero padding may stand between streams
            begun = True
            if hasattr(stream, "needs_input"):  # bzip2 and xz: decompress takes a limit on its output
                yield stream.decompress(data, CHUNK_BYTES)
                while not stream.eof and not stream.needs_input:
                    yield stream.decompress(b"", CHUNK_BYTES)
            else:
                yield stream.decompress(data)
            if not stream.eof:
                break
            data, begun, stream = stream.unused_data, False, make()
    if begun:
        raise EOFError("the compressed data ends too early")
