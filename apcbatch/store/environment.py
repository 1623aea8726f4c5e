"""Files: every file call of the store goes through here, so that tests can drop, cut, flip and fail each one.

Every method raises OSError where the system does, and for anything that is not a plain file or folder: no call follows
a link at the end of its path, and none waits for a pipe. A snapshot is never written in place: it is written whole
under a temporary name and renamed. It is not fsynced: a file torn by a power cut fails its checksum and costs one
snapshot, while an fsync for each costs more than computing it. Files are read, not mapped: the bytes that were verified
are the bytes that are used, even if another process cuts the file, and a bad sector is an error that can be handled
instead of a signal that ends the process. (From the page cache the two take equally long.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, Protocol

Buffer = bytes | bytearray | memoryview
Kind = Literal["file", "folder", "other"]
_MAX_VECTORS = 64
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Reader(Protocol):
    """Bytes that may be read at any offset; `size` is their number."""

    @property
    def size(self) -> int:
        """Their number."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from the offset; returns the bytes read, fewer than asked only at the end."""


class FileReader:
    """One open file; `size` is its length in bytes when it was opened."""

    def __init__(self, path: str) -> None:
        self._fd, self.size = _open_plain(path, os.O_RDONLY)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """As of Reader."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_plain(path: str, flags: int, mode: int = 0) -> tuple[int, int]:
    """The descriptor and the size of a regular file; anything else at the path is an OSError. mode: of a new file."""
    fd = os.open(path, flags | _PLAIN, mode)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise not_plain(path, "file")
    except BaseException:
        os.close(fd)
        raise
    return fd, status.st_size


def not_plain(path: str, kind: Kind) -> OSError:
    """The error for anything but a plain file or folder."""
    return OSError(errno.EINVAL, f"not a plain {kind}", path)


class FileLock:
    """An exclusive lock on an open file; the system releases it when its process ends, however it ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        os.close(self._fd)


class Files:
    """The file calls of the store. Subclass it to inject faults.

    Invariant: new files and folders are private to their owner, for any umask, unless the store's index has another
    mode (see follow_mode).
    """

    mode = 0o600  # of new files

    def follow_mode(self, path: str) -> None:
        """Give new files the mode of this one, if it exists, and folders the one that fits it."""
        with suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                self.mode = status.st_mode & 0o666

    def make_folders(self, path: str) -> None:
        """Make a folder and those above it if they are missing."""
        mode = self.mode | self.mode >> 2 & 0o111  # users who may read files may enter folders
        try:
            os.mkdir(path, mode)
        except FileNotFoundError:
            above = os.path.dirname(path)
            if os.path.isdir(above or "."):
                raise  # such as /proc, in which no folder can be made
            self.make_folders(above)
            os.mkdir(path, mode)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        return os.access(path, os.F_OK, follow_symlinks=False)

    def kind(self, path: str) -> Kind | None:
        """What is at the path itself (a link is `other`); None if there is nothing."""
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return None
        return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"

    def is_writable(self, folder: str) -> bool:
        """Whether this user may create files in the folder."""
        return os.access(folder, os.W_OK | os.X_OK)

    def touch(self, path: str) -> None:
        """Make an empty file if there is none."""
        os.close(_open_plain(path, os.O_CREAT | os.O_RDONLY, self.mode)[0])

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        """Create the file, which must not exist, and write the chunks to it one after the other."""
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, self.mode)
        try:
            left = [view for chunk in chunks if len(view := memoryview(chunk).cast("B"))]
            while left:
                count = os.writev(fd, left[:_MAX_VECTORS])
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if left:
                    left[0] = left[0][count:]
        finally:
            os.close(fd)

    def write_durably(self, path: str, data: bytes) -> None:
        """Give a small file this content and wait until it, and its name, are on the disk. Written in place, so that
        several processes may do it at once."""
        fd, _ = _open_plain(path, os.O_CREAT | os.O_RDWR, self.mode)
        try:
            if os.pwrite(fd, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            os.ftruncate(fd, len(data))
            os.fsync(fd)
        finally:
            os.close(fd)
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, source: str, target: str) -> None:
        """Give a file its final name at once; an older file of that name is replaced."""
        os.replace(source, target)

    def unlink(self, path: str) -> bool:
        """Remove a file; False if it did not exist."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def open(self, path: str) -> FileReader:
        return FileReader(path)

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none if the folder does not exist."""
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _PLAIN)
        except FileNotFoundError:
            return []
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def size(self, path: str) -> int:
        return os.lstat(path).st_size

    def modified(self, path: str) -> float:
        """When the file was last written, in seconds since 1970."""
        return os.lstat(path).st_mtime

    def lock(self, path: str, wait_s: float) -> FileLock | None:
        """Lock the file, created if missing; None if another holder has kept it for wait_s seconds."""
        fd, _ = _open_plain(path, os.O_CREAT | os.O_RDWR, self.mode)
        try:
            end = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return FileLock(fd)
                except BlockingIOError:
                    if time.monotonic() >= end:
                        os.close(fd)
                        return None
                    time.sleep(0.01)
        except BaseException:
            os.close(fd)
            raise
