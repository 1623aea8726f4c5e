"""Notices: the store's warnings, one line each, never twice for the same cause; of a damaged index the next
process is told as well.

Must not know: what became of the request; every notice is about speed, never about an answer.
"""

from __future__ import annotations

import errno
import os
import shlex
import threading
from collections.abc import Callable
from contextlib import suppress

from apcbatch.store.database import IndexDamaged, IndexFault
from apcbatch.store.files import Files
from apcbatch.store.format import SUSPECT_NAME

MAX_BAD_SNAPSHOT_LINES = 20
_DAMAGED_END = "the run goes on without it, and the next one makes it anew (results do not change)"


class Notices:
    """Passes sentences on to `warn`, which may be called from any thread."""

    def __init__(self, warn: Callable[[str], None], folder: str, files: Files | None) -> None:
        """files: None for a store in which nothing may be changed."""
        self._warn = warn
        self._folder = folder
        self._files = files
        self._said: set[str] = set()
        self._num_bad = 0
        self._lock = threading.Lock()

    def once(self, cause: str, sentence: str) -> None:
        """Say the sentence unless something with this cause was said before."""
        with self._lock:
            if cause in self._said:
                return
            self._said.add(cause)
        self._warn(f"store {self._folder}: {sentence}")

    def bad_snapshot(self, key: bytes, clause: str) -> None:
        """A snapshot file that cannot be used; after the first few, one line says that no more are listed."""
        with self._lock:
            self._num_bad += 1
            number = self._num_bad
        if number <= MAX_BAD_SNAPSHOT_LINES:
            self._warn(f"store {self._folder}: snapshot {key.hex()} is not used: {clause}; it is computed again")
        elif number == MAX_BAD_SNAPSHOT_LINES + 1:
            self.once(
                "bad", f"more bad snapshots are not listed; run: apcbatch store check {shlex.quote(str(self._folder))}"
            )

    def suspect_index(self) -> None:
        """Leave word for the next process that opens the store: it makes the index anew."""
        if self._files is not None:
            with suppress(OSError):
                self._files.write(os.path.join(self._folder, SUSPECT_NAME), [])

    def failure(self, error: OSError | IndexFault, doing: str) -> None:
        """An error of the system while the store was `doing` something; results do not depend on it."""
        if isinstance(error, OSError):
            full, cause = error.errno == errno.ENOSPC, f"os {error.errno}"
        else:
            full, cause = "full" in str(error), f"index {error}"
        if isinstance(error, IndexDamaged):
            self.suspect_index()
            self.once("damaged", f"the index is damaged ({error}); {_DAMAGED_END}")
        elif full:
            self.once("full", "the disk is full; snapshots are not kept (results do not change)")
        else:
            self.once(cause, f"{doing} failed ({error}); the run goes on without it (results do not change)")
