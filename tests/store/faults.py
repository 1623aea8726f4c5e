"""Fakes for the store's one seam to the disk: files that fail, tear, vanish and freeze at chosen calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from apcbatch.store.environment import Buffer, FileLock, FileReader, Files, Kind

CALLS = (
    "make_folders",
    "write",
    "write_durably",
    "kind",
    "rename",
    "unlink",
    "open",
    "names",
    "size",
    "modified",
    "lock",
    "is_writable",
)


class FaultyFiles(Files):
    """Real files; `fail(call, path)` may return an error to raise instead of doing the call."""

    def __init__(self, fail: Callable[[str, str], Exception | None] = lambda call, path: None) -> None:
        self.fail = fail

    def _enter(self, call: str, path: str) -> None:
        error = self.fail(call, path)
        if error is not None:
            raise error

    def make_folders(self, path: str) -> None:
        self._enter("make_folders", path)
        super().make_folders(path)

    def is_writable(self, folder: str) -> bool:
        return self.fail("is_writable", folder) is None and super().is_writable(folder)

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        error = self.fail("write", path)
        if error is not None:  # the disk fills up in the middle of a file
            super().write(path, [chunks[0]])
            raise error
        super().write(path, chunks)

    def write_durably(self, path: str, data: bytes) -> None:
        error = self.fail("write_durably", path)
        if error is not None:
            super().write(path, [data[:3]])
            raise error
        super().write_durably(path, data)

    def kind(self, path: str) -> Kind | None:
        self._enter("kind", path)
        return super().kind(path)

    def rename(self, source: str, target: str) -> None:
        self._enter("rename", target)
        super().rename(source, target)

    def unlink(self, path: str) -> bool:
        self._enter("unlink", path)
        return super().unlink(path)

    def open(self, path: str) -> FileReader:
        self._enter("open", path)
        return super().open(path)

    def names(self, folder: str) -> list[str]:
        self._enter("names", folder)
        return super().names(folder)

    def size(self, path: str) -> int:
        self._enter("size", path)
        return super().size(path)

    def modified(self, path: str) -> float:
        self._enter("modified", path)
        return super().modified(path)

    def lock(self, path: str, wait_s: float) -> FileLock | None:
        self._enter("lock", path)
        return super().lock(path, wait_s)


class PowerCutFiles(Files):
    """Files whose bytes never reach the disk beyond `kept`, although their names do."""

    def __init__(self, kept: int) -> None:
        self.kept = kept

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        data = b"".join(bytes(memoryview(chunk).cast("B")) for chunk in chunks)
        super().write(path, [data[: self.kept], bytes(len(data) - self.kept)])


def disk_full(path: str = "") -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def read_only(path: str = "") -> OSError:
    return OSError(errno.EROFS, os.strerror(errno.EROFS), path)


def bad_sector(path: str = "") -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO), path)
