"""OUT: the JSON lines of a run, one a request, each with the operating system as soon as it is written.

Must not know: what a line says, besides the number in its id. Invariants: a line is written whole or is the
torn last one; one process writes one OUT; a file is replaced only by a whole one (temporary name, fsync,
rename). Input order (--ordered) is made at the end, from the numbers and offsets of the lines (16 bytes
each): no line is held back in memory, and a run that is killed has lost none.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from apcbatch.errors import StoppedError, UsageError

STDOUT = "-"
WINDOW_BYTES = 1 << 16
ID = re.compile(rb'\{"id":"apc-(\d+)"')


class Sink(Protocol):
    """Where result lines go."""

    def append(self, line: bytes) -> None:
        """Hand one line, with its newline, to the system; StoppedError where it is not taken."""

    def finish(self, ordered: bool) -> None:
        """Put the lines into input order if asked to, and make them durable."""

    def close(self) -> None:
        """Let go of what is open."""


class StreamSink:
    """Standard output, a device or a pipe: cannot be resumed; ordered lines wait in a temporary file."""

    def __init__(self, stream: IO[bytes], ordered: bool) -> None:
        self._stream = stream
        self._spool: IO[bytes] | None = tempfile.TemporaryFile() if ordered else None  # noqa: SIM115

    def append(self, line: bytes) -> None:
        if self._spool is not None:
            self._spool.write(line)
        else:
            self._emit(line)

    def finish(self, ordered: bool) -> None:
        if self._spool is not None:
            self._spool.flush()
            for line in _sorted_lines(self._spool, _numbers_and_offsets(self._spool)):
                self._emit(line)
            self.close()

    def close(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def _emit(self, line: bytes) -> None:
        try:
            self._stream.write(line)
            self._stream.flush()
        except OSError as error:
            silence(self._stream)
            raise StoppedError(
                f"the reader of the results is gone ({error.strerror}); nothing more is computed"
            ) from None


class FileSink:
    """A regular file, locked for this process; opening it changes nothing in it."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.remove_if_empty = not self.path.exists()
        try:
            self._fd = self._open(self.path)
        except OSError as error:
            advice = (
                "" if self.path.parent.is_dir() else f"; make the folder first: mkdir -p {self.path.parent}"
            )
            raise UsageError(f"output {path} cannot be opened: {error.strerror}{advice}") from None

    def close(self) -> None:
        """Let go of the file; one that was made for nothing is removed again (see remove_if_empty)."""
        if self.remove_if_empty and os.fstat(self._fd).st_size == 0:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def truncate(self) -> None:
        """Empty the file (a fresh run)."""
        os.ftruncate(self._fd, 0)

    def has_lines(self) -> bool:
        """Whether there is a whole line."""
        size = os.fstat(self._fd).st_size
        return any(b"\n" in os.pread(self._fd, WINDOW_BYTES, begin) for begin in range(0, size, WINDOW_BYTES))

    def cut_torn_line(self) -> int:
        """Drop what follows the last newline; the number of bytes dropped."""
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
            os.ftruncate(self._fd, end)
        return size - end

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line) of each line, from the start."""
        offset = 0
        with open(self.path, "rb") as file:
            for line in file:
                yield offset, line
                offset += len(line)

    def line_at(self, offset: int) -> bytes:
        """The line that begins at offset."""
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.readline()

    def keep(self, wanted: Callable[[bytes], bool]) -> None:
        """Replace the file by its wanted lines."""
        self._replace(line for _, line in self.lines() if wanted(line))

    def append(self, line: bytes) -> None:
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise StoppedError(f"output {self.path} cannot be written: {error.strerror}") from None

    def finish(self, ordered: bool) -> None:
        if ordered:
            with open(self.path, "rb") as file:
                table = _numbers_and_offsets(file)
                if (np.diff(table[:, 0]) < 0).any():
                    self._replace(_sorted_lines(file, table))
        os.fsync(self._fd)

    def _replace(self, lines: Iterator[bytes]) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            with open(temporary, "wb") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(stat.S_IMODE(os.fstat(self._fd).st_mode))
            fd = self._open(temporary)
            os.replace(temporary, self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StoppedError(f"output {self.path} cannot be rewritten: {error.strerror}") from None
        os.close(self._fd)
        self._fd = fd

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise UsageError(
                f"output {path} is being written by another run; wait for it, or choose another"
            ) from None
        except OSError:
            pass  # a file system without locks
        return fd


def open_sink(output: str, ordered: bool) -> FileSink | StreamSink:
    """The sink for `-o OUTPUT`; UsageError where nothing can be written there."""
    if output == STDOUT:
        return StreamSink(sys.stdout.buffer, ordered)
    path = Path(output)
    if path.is_dir():
        raise UsageError(f"output {path} is a folder; expected a file, such as {path / 'out.jsonl'}")
    if path.exists() and not path.is_file():
        return StreamSink(open(path, "wb", buffering=0), ordered)
    return FileSink(path)


def silence(stream: IO[Any]) -> None:
    """Send what is still buffered for a reader that is gone to nowhere: closing must not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _numbers_and_offsets(file: IO[bytes]) -> npt.NDArray[np.int64]:
    """(lines, 2): the number in each line's id and the line's offset."""
    table, offset = array("q"), 0
    file.seek(0)
    for line in file:
        match = ID.match(line)
        table.extend((int(match[1]) if match else 0, offset))
        offset += len(line)
    return np.frombuffer(table, dtype=np.int64).reshape(-1, 2)


def _sorted_lines(file: IO[bytes], table: npt.NDArray[np.int64]) -> Iterator[bytes]:
    for offset in table[np.argsort(table[:, 0], kind="stable"), 1].tolist():
        file.seek(offset)
        yield file.readline()
