"""Write OUT and the files beside it: file calls, replacement of a whole file, calls in a background thread.

Tests use a Disk that drops everything that was not synced. Invariants: a temporary file is always new, and locked while
its process lives; a replaced file has either all of its old or all of its new content, even after a power cut.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread

import xxhash

from apcbatch.address import is_stream
from apcbatch.regular_files import lock_within

_TEMPORARY = re.compile(r"(\.apcbatch-[0-9a-f]{16}-)[0-9a-f]{16}\.tmp")
_LOCK_WAIT_S = 1.0  # a process that looks for left files holds the lock of one for microseconds


class Disk:
    """File calls of a run's outputs. Every method raises OSError if the system does."""

    def open(self, path: str, flags: int) -> int:
        """Open a file for reading and appending, and create it if needed. flags: further flags of os.open."""
        return os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, data: bytes) -> None:
        """Write all of the data, in as many system calls as that takes."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Sync the file's content, so that it survives a power cut."""
        os.fsync(fd)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_folder(self, folder: str) -> None:
        """Sync the names in a folder, so that they survive a power cut, if the file system supports that."""
        with suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


@contextmanager
def replacing(path: str, disk: Disk) -> Iterator[int]:
    """Yield the descriptor of a new file, which replaces `path` at the end of the block and gets the old file's
    permissions. If the block fails, remove the new file."""
    fd, temporary = _open_temporary(path, disk)
    try:
        if os.path.exists(path):
            os.fchmod(fd, stat.S_IMODE(os.stat(path).st_mode))
        yield fd
        disk.sync(fd)
        disk.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            disk.unlink(temporary)
        raise
    finally:
        os.close(fd)
    disk.sync_folder(os.path.dirname(path) or ".")


def remove_left_files(paths: Iterable[str]) -> None:
    """Remove the temporary files that killed processes have left of these files.

    One that a living process writes is locked and stays; so does one that cannot be locked, a temporary file of another
    path, and a file whose name has not exactly that form.
    """
    folders: dict[str, set[str]] = {}
    for path in paths:
        folder, prefix = os.path.split(_temporary_prefix(path))
        folders.setdefault(folder or ".", set()).add(prefix)
    for folder, prefixes in folders.items():
        with suppress(OSError):
            for name in os.listdir(folder):
                if (match := _TEMPORARY.fullmatch(name)) and match[1] in prefixes:
                    _remove_unlocked(os.path.join(folder, name))


def _remove_unlocked(path: str) -> None:
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode) and lock_within(fd, 0):
                os.unlink(path)
        finally:
            os.close(fd)


def _open_temporary(path: str, disk: Disk) -> tuple[int, str]:
    """Create and lock a new file beside `path`; return its descriptor and its path."""
    while True:
        temporary = f"{_temporary_prefix(path)}{secrets.token_hex(8)}.tmp"
        fd = disk.open(temporary, os.O_EXCL)
        with suppress(OSError):  # a file system without locks
            lock_within(fd, _LOCK_WAIT_S)
        if os.path.exists(temporary):
            return fd, temporary
        os.close(fd)  # another process took it for a left one before it was locked


def _temporary_prefix(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".apcbatch-{xxhash.xxh3_64_hexdigest(os.fsencode(name))}-")


def write_file(path: str, chunks: Iterable[bytes], disk: Disk) -> None:
    """Write a file atomically; a descriptor, a pipe or a device is written to directly. path: a place, so that no link
    is followed."""
    if is_stream(path):
        with open(path, "ab", buffering=0) as stream:
            for chunk in chunks:
                disk.write(stream.fileno(), chunk)
        return
    with replacing(path, disk) as fd:
        for chunk in chunks:
            disk.write(fd, chunk)


SHORT_CALL_S = 0.02  # `begin` raises the error of a call that ends within this time


class BackgroundCall:
    """Background thread that runs one call at a time."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call is running."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, call: Callable[[], None]) -> None:
        """Wait for the previous call, start this one and wait SHORT_CALL_S for it; raise the error of either."""
        self.finish()
        self._thread = Thread(target=self._run, args=(call,), name="apcbatch-disk", daemon=True)
        self._thread.start()
        self._thread.join(SHORT_CALL_S)
        if not self.is_busy:
            self.finish()

    def finish(self) -> None:
        """Wait for the running call, if there is one; raise its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # finish() raises it
            self._error = error
