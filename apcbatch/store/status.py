"""Status: counters and warnings of an open store. A warning is one line, and is given once per cause.

Every warning is about speed: answers never change. Any thread may count and warn.
"""

from __future__ import annotations

import errno
import os
import shlex
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from apcbatch.store.database import IndexDamaged, IndexFault
from apcbatch.store.environment import Files
from apcbatch.store.format import SUSPECT_NAME

MAX_BAD_SNAPSHOT_LINES = 20
WITHOUT = "the run continues without it (results do not change)"  # the end of a warning of what a store cannot do
_DAMAGED_END = "the run continues without it, and the next one makes it anew (results do not change)"


@dataclass(slots=True)
class StoreCounters:
    """Numbers of snapshots, and bytes of whole files (bytes_written) or of their tensors (bytes_read).

    written: stored by this process. duplicates: offered but already stored. skipped_*: offered and not stored, because
    the queue was full, the size limit left no room, or the parent was not stored. failed: not stored because of an
    error of the system, or because another key has the same row id. read: files read (each link of a chain counts).
    bad: files that must not be used.
    """

    written: int = 0
    bytes_written: int = 0
    read: int = 0
    bytes_read: int = 0
    duplicates: int = 0
    skipped_full_queue: int = 0
    skipped_no_room: int = 0
    skipped_stranded: int = 0
    failed: int = 0
    evicted: int = 0
    bad: int = 0

    @property
    def skipped(self) -> int:
        """Number of snapshots offered and not stored, except duplicates."""
        return self.skipped_full_queue + self.skipped_no_room + self.skipped_stranded + self.failed


class Status:
    """Counts events, and passes warnings on to `warn`, which any thread may call."""

    def __init__(self, warn: Callable[[str], None], folder: str, files: Files | None) -> None:
        """files: None for a store in which nothing may be changed."""
        self._warn, self._folder, self._files = warn, folder, files
        self._counters = StoreCounters()
        self._causes: set[str] = set()
        self._lock = threading.Lock()

    @property
    def counters(self) -> StoreCounters:
        """Copy of the counters."""
        with self._lock:
            return replace(self._counters)

    def count(self, **amounts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)

    def once(self, cause: str, sentence: str) -> None:
        """Warn, unless this cause was warned about before."""
        with self._lock:
            if cause in self._causes:
                return
            self._causes.add(cause)
        self._warn(f"store {self._folder}: {sentence}")

    def bad_snapshot(self, key: bytes, clause: str) -> None:
        """Count a snapshot file that cannot be used, and warn about it. After MAX_BAD_SNAPSHOT_LINES, warn once that no
        more are listed."""
        with self._lock:
            self._counters.bad += 1
            number = self._counters.bad
        if number <= MAX_BAD_SNAPSHOT_LINES:
            self._warn(f"store {self._folder}: snapshot {key.hex()} is not used: {clause}; it is computed again")
        else:
            self.once(
                "bad", f"more bad snapshots are not listed; run: apcbatch store check {shlex.quote(str(self._folder))}"
            )

    def suspect_index(self) -> None:
        """Leave a file that makes the next process that opens the store rebuild the index."""
        if self._files is not None:
            with suppress(OSError):
                self._files.write(os.path.join(self._folder, SUSPECT_NAME), [])

    def failure(self, error: OSError | IndexFault, doing: str) -> None:
        """Warn about an error of the system. doing: the activity that failed, such as `reading a snapshot`."""
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
            self.once(cause, f"{doing} failed ({error}); {WITHOUT}")
