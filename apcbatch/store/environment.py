"""Files: all file system calls of the store, in one class, so that tests can inject faults into each of them.

Every method raises OSError where the system does, and for anything but a plain file or folder. No call follows a link
at the end of its path, and none blocks on a pipe.

A snapshot is written whole under a temporary name, then renamed. It is not fsynced: a file torn by a power cut fails
its checksum and costs one snapshot, while an fsync costs more than computing the snapshot.

Files are read, not mapped. So the verified bytes are the bytes that are used, even if another process truncates the
file, and a bad sector is an OSError instead of a signal that ends the process. From the page cache, reading takes as
long as mapping.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import BinaryIO, Literal, Protocol

from apcbatch.regular_files import lock_within

Buffer = bytes | bytearray | memoryview
Kind = Literal["file", "folder", "other"]
_MAX_VECTORS = 64
MOUNTS = "/proc/self/mountinfo"
_NETWORK = {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
_LOCAL_FUSE = {f"fuse.{name}" for name in ("bindfs", "encfs", "fuse-overlayfs", "gocryptfs", "mergerfs")}
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Reader(Protocol):
    """Random access to a sequence of bytes. size: its length."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from the offset, and return the number of bytes read: fewer than requested only at the
        end."""


class FileReader:
    """One open file. size: its length in bytes when it was opened."""

    def __init__(self, path: str) -> None:
        self._fd, self.size = _open_plain(path, os.O_RDONLY)

    def read_into(self, offset: int, buffer: memoryview) -> int:
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

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_plain(path: str, flags: int, mode: int = 0) -> tuple[int, int]:
    """Open a regular file, and return its descriptor and its size. Raises OSError for anything else at the path.

    mode: permissions of a new file.
    """
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
    """Return the OSError for anything but a plain file or folder."""
    return OSError(errno.EINVAL, f"not a plain {kind}", path)


class Files:
    """File system calls of the store. Tests override methods to inject faults.

    Invariant: new files and folders are accessible to their owner only, under any umask, unless the store's index has
    another mode (see follow_mode).
    """

    mode = 0o600  # permissions of new files

    def follow_mode(self, path: str) -> None:
        """Give new files the mode of the file at this path, if it exists, and new folders the matching mode."""
        with suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                self.mode = status.st_mode & 0o666

    def make_folders(self, path: str) -> None:
        """Create a folder and its missing parents."""
        mode = self.mode | self.mode >> 2 & 0o111  # read permission on files gives search permission on folders
        try:
            os.mkdir(path, mode)
        except FileNotFoundError:
            above = os.path.dirname(path)
            if os.path.isdir(above or "."):
                raise  # the parent allows no folders, such as /proc
            self.make_folders(above)
            os.mkdir(path, mode)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        return os.access(path, os.F_OK, follow_symlinks=False)

    def network_file_system(self, folder: str) -> str | None:
        """Return the type of the file system of a folder, such as `nfs4`, if other hosts may have mounted it too; None
        for a local or unknown one."""
        device = os.stat(folder).st_dev
        with open(MOUNTS, encoding="utf-8", errors="replace") as mounts:
            for mount in mounts:
                place, _, kind = mount.partition(" - ")
                if place.split(" ")[2] == f"{os.major(device)}:{os.minor(device)}":
                    name = kind.split(" ")[0]
                    is_fuse = name.split(".")[0] == "fuse" and name not in _LOCAL_FUSE
                    return name if is_fuse or name in _NETWORK else None
        return None

    def kind(self, path: str) -> Kind | None:
        """Return the kind of the path itself, for which a link is `other`; None if nothing is there."""
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return None
        return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"

    def is_writable(self, folder: str) -> bool:
        """Return whether this user may create files in the folder."""
        return os.access(folder, os.W_OK | os.X_OK)

    def touch(self, path: str) -> None:
        """Create an empty file if there is none."""
        os.close(_open_plain(path, os.O_CREAT | os.O_RDONLY, self.mode)[0])

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        """Create a file, which must not exist, with the concatenation of the chunks."""
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
        """Set the content of a small file, and wait until it and its name are on the disk.

        The file is written in place, so several processes may do it at once.
        """
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
        """Rename a file atomically, replacing an older file of that name."""
        os.replace(source, target)

    def unlink(self, path: str) -> bool:
        """Remove a file. Return False if it did not exist."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def open(self, path: str) -> FileReader:
        return FileReader(path)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if the folder does not exist."""
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
        """Return when the file was last written, in seconds since 1970."""
        return os.lstat(path).st_mtime

    def lock(self, path: str, wait_s: float) -> BinaryIO | None:
        """Lock a file, which is created if missing, until it is closed or the process ends, even by a kill. Return None
        if another holder kept the lock for wait_s seconds."""
        file = os.fdopen(_open_plain(path, os.O_CREAT | os.O_RDWR, self.mode)[0], "rb")
        with ExitStack() as undo:
            undo.callback(file.close)
            if lock_within(file.fileno(), wait_s):
                undo.pop_all()
                return file
        return None
