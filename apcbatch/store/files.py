"""Files: the one seam through which the store touches the disk, so that a test can drop, cut, flip and fail
each call.

Must not know: keys, snapshots, the index. Every method raises OSError exactly where the system does. No file
is ever written in place: it is written whole under a temporary name and renamed. There is no fsync: a file
torn by a power cut is caught by its checksum and costs one snapshot, while an fsync for each costs more than
computing it. Files are read, not mapped: what was verified is then what is used, whoever cuts the file
meanwhile, and a bad sector is an error that can be handled instead of a signal that ends the process. (From
the page cache the two take equally long.)
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

Buffer = bytes | bytearray | memoryview
_MAX_VECTORS = 64


class FileReader:
    """One open file; `size` is its length in bytes when it was opened."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from the offset; returns the bytes read, fewer than asked only at the end of the
        file."""
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


class FileLock:
    """An exclusive lock on an open file; the system releases it when its process ends, however it ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        os.close(self._fd)


class Files:
    """The file calls of the store. Subclass it to inject faults.

    Invariant: what is made is its owner's alone, whatever the umask, unless the store was opened to others (see
    follow_mode).
    """

    mode = 0o600  # of new files

    def follow_mode(self, path: str) -> None:
        """Make new files with the mode of this one, and folders with what fits it, if it is there."""
        with suppress(OSError):
            self.mode = os.lstat(path).st_mode & 0o666

    def make_folders(self, path: str) -> None:
        """Make a folder and those above it, where they are missing."""
        mode = self.mode | self.mode >> 2 & 0o111  # whoever may read files may enter folders
        try:
            os.mkdir(path, mode)
        except FileNotFoundError:
            self.make_folders(os.path.dirname(path))
            self.make_folders(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def is_writable(self, folder: str) -> bool:
        """Whether this user may create files in the folder."""
        return os.access(folder, os.W_OK | os.X_OK)

    def touch(self, path: str) -> None:
        """Make an empty file where there is none."""
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, self.mode))

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

    def rename(self, source: str, target: str) -> None:
        """Give a file its final name at once; an older file of that name is replaced."""
        os.replace(source, target)

    def unlink(self, path: str) -> bool:
        """Remove a file; False where it was gone already."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def open(self, path: str) -> FileReader:
        return FileReader(path)

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none where the folder does not exist."""
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def modified(self, path: str) -> float:
        """When the file was last written, in seconds since 1970."""
        return os.stat(path).st_mtime

    def lock(self, path: str, wait_s: float) -> FileLock | None:
        """Lock the file, created where missing; None where another holder has kept it for wait_s seconds."""
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, self.mode)
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
