"""Write OUT: one JSON line per request, handed to the operating system as soon as it is complete.

Invariants for a file: each of its lines is complete, except that a crash may leave the last one torn; only one process
at a time writes it; it is replaced only by a complete file. A background thread syncs the lines every SYNC_EVERY_S
seconds, after a check that OUT is still where it was opened. When the run ends, OUT is read once and compared with a
digest of what it should hold. No line is held back in memory, so a killed run loses
none: --ordered sorts the file only when the run ends, by a table of each line's request number and offset (16 bytes a
line).
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from apcbatch.display import json_escaped
from apcbatch.errors import StoppedError, UsageError
from apcbatch.job.disk import BackgroundCall, Disk, replacing
from apcbatch.job.output_paths import STDOUT
from apcbatch.process import silence
from apcbatch.regular_files import lock_within

SYNC_EVERY_S = 2.0
LOCK_WAIT_S = 2.0  # a helper process of a killed run holds the run's lock until it runs its own program
WINDOW_BYTES = 1 << 16
READ_BYTES = 1 << 20
LINE_BYTES = 1 << 13  # read at once by line_at; most lines are shorter
LAST = (1 << 62) - 1  # position of a line that belongs to no request of the input
ID = re.compile(rb'\{"id":"apc-(\d+)"')


class Sink(Protocol):
    """Destination of the result lines."""

    def append(self, line: bytes) -> None:
        """Write one line, including its newline, to the operating system; StoppedError if the system refuses it."""

    def sync_if_due(self) -> None:
        """Begin to make the lines durable if SYNC_EVERY_S seconds have passed since the last time; StoppedError if that
        or the previous sync fails."""

    def finish(self, ordered: bool, places: Sequence[int] = ()) -> None:
        """Make the lines durable and, if `ordered`, sort them into input order: by the number in each line's id, or by
        its position. places: pairs (number, position), one after the other, of lines whose number is not their
        position."""

    def close(self) -> None:
        """Close all open files."""


class StreamSink:
    """Sink for standard output, a device or a pipe. It cannot be resumed. With --ordered, lines wait in a temporary
    file until the run ends."""

    def __init__(self, stream: IO[bytes], name: str, ordered: bool) -> None:
        self._stream, self._name = stream, name
        self._spool: IO[bytes] | None = tempfile.TemporaryFile() if ordered else None  # noqa: SIM115

    def append(self, line: bytes) -> None:
        with self._stop_on_error():
            if self._spool is None:
                self._emit(line)
            else:
                self._spool.write(line)

    def sync_if_due(self) -> None:
        pass

    def finish(self, ordered: bool, places: Sequence[int] = ()) -> None:
        with self._stop_on_error():
            if self._spool is not None:
                self._spool.flush()
                for line in _sorted_lines(self._spool, _numbers_and_offsets(self._spool)):
                    self._emit(line)

    def close(self) -> None:
        if self._spool is not None:
            with suppress(OSError):
                self._spool.close()

    def _emit(self, line: bytes) -> None:
        if self._stream.isatty():
            line = json_escaped(line.decode()).encode()
        self._stream.write(line)
        self._stream.flush()

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """Turn an OSError into a StoppedError, and redirect the broken stream to /dev/null."""
        try:
            yield
        except BrokenPipeError:
            silence(self._stream)
            raise StoppedError("the reader of the results is gone; nothing more is computed") from None
        except OSError as error:
            silence(self._stream)
            raise StoppedError(f"{self._name} cannot be written: {error.strerror}") from None


class FileSink:
    """Sink for a regular file, locked for this process. path: its place; a link is not followed. Opening leaves the
    content unchanged.

    remove_if_unused: `close` removes the file if it is empty, or has only what `fill` wrote. True at first for a file
    that did not exist; the caller sets it to False before the first line.
    """

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path = Path(os.path.abspath(path))
        self.disk = disk or Disk()
        self.remove_if_unused = not os.path.exists(self.path)
        self._size = 0  # in bytes; another size means that another program wrote to the file
        self._digest: xxhash.xxh3_64 | None = None  # of the content that the file should have; None: not known
        self._is_filled = False
        self._background = BackgroundCall()
        self._next_sync, self._is_synced = time.monotonic() + SYNC_EVERY_S, True
        try:
            self._fd = self.disk.open(str(self.path), os.O_NOFOLLOW)
        except OSError as error:
            raise UsageError(f"output {path} cannot be opened: {error.strerror}; choose another -o") from None
        try:
            self._lock(self._fd)
        except UsageError:
            os.close(self._fd)
            raise
        self._size = os.fstat(self._fd).st_size

    @property
    def is_empty(self) -> bool:
        return os.fstat(self._fd).st_size == 0

    def close(self) -> None:
        """Close the file. Remove it first if it is new and has no line of this run (see remove_if_unused)."""
        with suppress(StoppedError):  # raised by the last sync
            self._background.finish()
        is_unused = self._is_filled or self.is_empty
        if self.remove_if_unused and is_unused and self._is_in_place():
            self.disk.unlink(str(self.path))
        os.close(self._fd)

    def truncate(self) -> None:
        """Empty the file for a fresh run, and sync, so that no power cut brings its lines back."""
        with self._stop_on_error("emptied"):
            self.disk.truncate(self._fd, 0)
            self._size, self._digest = 0, xxhash.xxh3_64()
            self.disk.sync(self._fd)
            self.disk.sync_folder(str(self.path.parent))

    def has_lines(self) -> bool:
        """Return whether the file has at least one complete line."""
        size = os.fstat(self._fd).st_size
        return any(b"\n" in os.pread(self._fd, WINDOW_BYTES, begin) for begin in range(0, size, WINDOW_BYTES))

    def cut_torn_line(self) -> int:
        """Cut off the bytes after the last newline, and return their number."""
        size = os.fstat(self._fd).st_size
        end = size
        while end > 0:
            begin = max(0, end - WINDOW_BYTES)
            newline = os.pread(self._fd, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size:
            with self._stop_on_error("shortened"):
                self.disk.truncate(self._fd, end)
                self._size, self._digest = end, self._digest_now()
        return size - end

    def lines(self, last_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (byte offset, line) of each line, from the start. last_bytes: yield only lines that lie entirely within
        that many bytes at the file's end."""
        offset, digest = 0, xxhash.xxh3_64()
        with open(self.path, "rb") as file:
            if last_bytes is not None and (size := os.fstat(file.fileno()).st_size) > last_bytes:
                file.seek(size - last_bytes - 1)
                file.readline()
                offset = file.tell()
            for line in file:
                digest.update(line)
                yield offset, line
                offset += len(line)
        if last_bytes is None:
            self._digest = digest

    def line_at(self, offset: int) -> bytes:
        """Return the line that begins at a byte offset, without its newline."""
        pieces = [os.pread(self._fd, LINE_BYTES, offset)]
        while pieces[-1] and b"\n" not in pieces[-1]:
            offset += len(pieces[-1])
            pieces.append(os.pread(self._fd, WINDOW_BYTES, offset))
        return b"".join(pieces).partition(b"\n")[0]

    def fill(self, chunks: Iterator[bytes]) -> None:
        """Replace the content by that of a compressed OUT. chunks: its decompressed content. The file must have no
        complete line of its own."""
        self._replace(chunks)
        self._is_filled = True

    def keep(self, wanted: Callable[[int, bytes], bool]) -> None:
        """Rewrite the file with only those lines for which `wanted` returns True, given byte offset and line."""
        self._replace(line for offset, line in self.lines() if wanted(offset, line))

    def append(self, line: bytes) -> None:
        self._is_synced = False
        with self._stop_on_error("written"):
            self._check_size()
            self.disk.write(self._fd, line)
        self._size += len(line)
        if self._digest is not None:
            self._digest.update(line)

    def sync_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._next_sync and not self._background.is_busy:
            self._next_sync = now + SYNC_EVERY_S
            self._check_place()
            if not self._is_synced:
                self._is_synced = True  # a line appended during this sync waits for the next one
                self._background.begin(self._sync)

    def finish(self, ordered: bool, places: Sequence[int] = ()) -> None:
        self._background.finish()
        self._check_place()
        if not self._is_synced:
            self._sync()
            self._is_synced = True
        if self._digest is not None and self._digest_now().digest() != self._digest.digest():
            raise StoppedError(
                f"output {self.path} was written to by another program while this run wrote it: it has other bytes "
                "than this run gave it; --resume names a line that is no record, but cannot tell a changed answer: "
                "--overwrite makes all of them again"
            )
        if ordered:
            with open(self.path, "rb") as file:
                table = _numbers_and_offsets(file)
                table[:, 0] = _positions(table[:, 0], places)
                if (np.diff(table[:, 0]) < 0).any():
                    self._replace(_sorted_lines(file, table))

    def _check_place(self) -> None:
        """Raise StoppedError if OUT is no longer where it was opened, or has another size than this run gave it."""
        if not self._is_in_place():
            raise StoppedError(
                f"output {self.path} was removed, renamed or replaced while this run wrote it, and what was "
                "answered since is not under that name; put it back and resume, or run again"
            )
        self._check_size()

    def _check_size(self) -> None:
        """Raise StoppedError if another program wrote to OUT. Called before each line, so that none is appended to a
        partial line of that program."""
        size = os.fstat(self._fd).st_size
        if size != self._size:
            raise StoppedError(
                f"output {self.path} was {'shortened' if size < self._size else 'written to'} by another program while "
                f"this run wrote it: it has {size:,} bytes of {self._size:,}; --resume answers what is missing"
            )

    def _digest_now(self) -> xxhash.xxh3_64:
        """Return the digest of the file's content."""
        digest = xxhash.xxh3_64()
        with self._stop_on_error("read"):
            for begin in range(0, os.fstat(self._fd).st_size, READ_BYTES):
                digest.update(os.pread(self._fd, READ_BYTES, begin))
        return digest

    def _sync(self) -> None:
        """Sync the file, so that its lines survive a power cut."""
        with self._stop_on_error("synced"):
            self.disk.sync(self._fd)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return False

    def _replace(self, lines: Iterator[bytes]) -> None:
        with self._stop_on_error("rewritten"), replacing(str(self.path), self.disk) as new:
            digest = xxhash.xxh3_64()
            for line in lines:
                self.disk.write(new, line)
                digest.update(line)
            fd = os.dup(new)  # with its lock
        os.close(self._fd)
        self._fd, self._size, self._digest = fd, os.fstat(fd).st_size, digest

    @contextmanager
    def _stop_on_error(self, done: str) -> Iterator[None]:
        """Turn an OSError into a StoppedError. done: what was refused, as a participle: `written`."""
        try:
            yield
        except OSError as error:
            raise StoppedError(f"output {self.path} cannot be {done}: {error.strerror}") from None

    def _lock(self, fd: int) -> None:
        """Lock OUT against other runs. Raises UsageError if one holds the lock for more than LOCK_WAIT_S."""
        with suppress(OSError):  # a file system without locks
            if not lock_within(fd, LOCK_WAIT_S):
                raise UsageError(f"output {self.path} is being written by another run; wait for it, or choose another")


def open_sink(output: str, ordered: bool) -> FileSink | StreamSink:
    """Open the sink for `-o OUTPUT`; UsageError if nothing can be written there."""
    if output == STDOUT:
        if sys.stdout is None:
            raise UsageError("standard output is closed; give -o a file")
        return StreamSink(sys.stdout.buffer, "standard output", ordered)
    if os.path.exists(output) and not os.path.isfile(output):
        try:
            return StreamSink(open(output, "wb", buffering=0), f"output {output}", ordered)
        except OSError as error:
            raise UsageError(f"output {output} cannot be opened: {error.strerror}; choose another -o") from None
    return FileSink(Path(output))


def _numbers_and_offsets(file: IO[bytes]) -> npt.NDArray[np.int64]:
    """Return (lines, 2) int64: the request number in each line's id, or 0 if it has none, and the line's byte
    offset."""
    table, offset = array("q"), 0
    file.seek(0)
    for line in file:
        match = ID.match(line)
        table.extend((int(match[1]) if match else 0, offset))
        offset += len(line)
    return np.array(table, dtype=np.int64).reshape(-1, 2)


def _positions(numbers: npt.NDArray[np.int64], places: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the position of each request, (lines,) int64: the one in `places`, or else its number. numbers: (lines,)
    int64, of the requests. places: see Sink.finish."""
    if not places:
        return numbers
    moved = np.array(places, dtype=np.int64).reshape(-1, 2)
    moved = moved[np.argsort(moved[:, 0], kind="stable")]
    at = np.minimum(np.searchsorted(moved[:, 0], numbers), len(moved) - 1)
    return np.where(moved[at, 0] == numbers, moved[at, 1], numbers)


def _sorted_lines(file: IO[bytes], table: npt.NDArray[np.int64]) -> Iterator[bytes]:
    for offset in table[np.argsort(table[:, 0], kind="stable"), 1].tolist():
        file.seek(offset)
        yield file.readline()
