"""Fakes for the store's one seam to the disk: files that fail, tear, vanish and freeze at chosen calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

from apcbatch.store.environment import Buffer, Files

CALLS = ("make_folders", "write", "write_durably", "kind", "rename", "unlink", "open", "names", "size", "modified",
         "lock", "is_writable")  # fmt: skip


class FaultyFiles(Files):
    """Real files; `fail(call, path)` may return an error to raise instead of doing the call. A rename is asked for its
    target; a write that fails leaves what it has begun with, as where the disk fills up in the middle of a file."""

    def __init__(self, fail: Callable[[str, str], Exception | None] = lambda call, path: None) -> None:
        self.fail = fail

    def is_writable(self, folder: str) -> bool:
        return self.fail("is_writable", folder) is None and super().is_writable(folder)


def _faulty(call: str) -> Callable[..., Any]:
    def run(self: FaultyFiles, path: str, *given: Any, **options: Any) -> Any:
        error = self.fail(call, given[0] if call == "rename" else path)
        if error is None:
            return getattr(Files, call)(self, path, *given, **options)
        if call.startswith("write"):
            Files.write(self, path, [given[0][:3]] if call == "write_durably" else [given[0][0]])
        raise error

    return run


for _call in CALLS[:-1]:
    setattr(FaultyFiles, _call, _faulty(_call))


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
