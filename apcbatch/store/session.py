"""Session: one process that may write to a store, and its temporary files.

A session locks a file of its own. The system releases the lock when the process ends, even by a kill. So the next
process that opens the store knows which temporary files are left over.
"""

from __future__ import annotations

import itertools
import os
import re
import uuid
from typing import BinaryIO

from apcbatch.store.environment import Files
from apcbatch.store.format import TEMPORARY_FOLDER

_LOCK_SUFFIX = ".lock"
_NAME = re.compile(rf"([0-9a-f]{{32}})(?:({re.escape(_LOCK_SUFFIX)})|-[0-9]+\.tmp)")


class Session:
    """A writing process of a store. Call `end` after the last write."""

    def __init__(self, files: Files, folder: str) -> None:
        """Create the session's lock file. The caller must hold the store's own lock. Raises OSError if the folder
        cannot be written."""
        self.name = uuid.uuid4().hex
        self._files = files
        self._folder = os.path.join(folder, TEMPORARY_FOLDER)
        self._numbers = itertools.count()
        files.make_folders(self._folder)
        self._lock_path = os.path.join(self._folder, self.name + _LOCK_SUFFIX)
        lock = files.lock(self._lock_path, wait_s=0.0)
        if lock is None:
            raise OSError(f"{self._lock_path} is locked by another process")
        self._lock: BinaryIO = lock

    def temporary_path(self) -> str:
        """Return an unused path for a file to be written."""
        return os.path.join(self._folder, f"{self.name}-{next(self._numbers)}.tmp")

    def end(self) -> None:
        """Delete the lock file, and release the lock."""
        try:
            self._files.unlink(self._lock_path)
        finally:
            self._lock.close()


def sweep(files: Files, folder: str) -> tuple[set[str], list[str]]:
    """Remove the files of ended sessions. Return (names of the live sessions, paths of the temporary files removed).

    Only plain files with exactly the names that a session gives are considered. The caller must hold the store's own
    lock.
    """
    folder = os.path.join(folder, TEMPORARY_FOLDER)
    found = [
        (match[1], match[2] is not None, os.path.join(folder, name))
        for name in files.names(folder)
        if (match := _NAME.fullmatch(name)) and files.kind(os.path.join(folder, name)) == "file"
    ]
    living: set[str] = set()
    for session, is_lock, path in found:
        if is_lock:
            lock = files.lock(path, wait_s=0.0)
            if lock is None:
                living.add(session)
            else:
                files.unlink(path)
                lock.close()
    stale = [path for session, is_lock, path in found if not is_lock and session not in living]
    return living, [path for path in stale if files.unlink(path)]
