"""Open, read and lock regular files. Those that are read, such as configurations and tokenizers, have a bounded size.

Invariants:
- Only regular files are read: a named pipe would block for ever, and a device has no end.
- No more than the bound is held in memory.
- Every failure is an OSError whose `strerror` can end a sentence.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import xxhash

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(mode: int) -> str:
    """Return the kind of a file from the mode of `stat`: `a folder`, `a named pipe`, ... or `a regular file`."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a regular file")


def open_regular_file(path: str | Path) -> BinaryIO:
    """Open a file for reading, following links. Raises OSError if it is absent, not permitted or not a regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a NUL character
        raise _error(errno.EINVAL, "it is not a file name", path) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _error(errno.EINVAL, f"it is {kind_of(mode)}; expected a regular file", path)
    return open(descriptor, "rb")


def read_regular_file(path: str | Path, max_bytes: int) -> bytes:
    """Return the bytes of a file. Raises OSError if it cannot be opened, is not regular or holds more than
    max_bytes."""
    with open_regular_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise _error(errno.EFBIG, f"it holds more than {max_bytes:,} bytes; at most that many are read", path)
    return data


def digest_of(paths: Iterable[str | Path]) -> str:
    """Return one xxh3-128, in hex, over all bytes of files. Raises OSError."""
    digest = xxhash.xxh3_128()
    for path in paths:
        with open_regular_file(path) as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def identity(file: int | str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Return (device, inode, size, mtime) of an open file or a path, which changes with each replacement or write; None
    if there is none."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def lock_within(descriptor: int, wait_s: float) -> bool:
    """Lock an open file exclusively against other processes (flock). Return False if another holder kept the lock for
    wait_s seconds. Raises OSError, as on a file system without locks."""
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)


def _error(number: int, sentence: str, path: str | Path) -> OSError:
    return OSError(number, sentence, str(path))
