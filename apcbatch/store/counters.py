"""Counters: what one open store has done since it was opened.

Must not know: what is counted where. Threads of the engine and of the store count at the same time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(slots=True)
class StoreCounters:
    """Numbers of snapshots, and bytes of their files.

    written: stored by this process. duplicates: offered, but there already. skipped_*: offered and not
    stored, because the queue was full, no room could be made under the size limit, or the parent was not
    stored. failed: not stored because the system refused. read: files handed out (each link of a chain
    counts). bad: files that must not be used.
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
        """Snapshots that were offered and are not stored, for whatever reason."""
        return self.skipped_full_queue + self.skipped_no_room + self.skipped_stranded + self.failed


class Tally:
    """StoreCounters that several threads add to."""

    def __init__(self) -> None:
        self._counters = StoreCounters()
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)

    def copy(self) -> StoreCounters:
        with self._lock:
            return StoreCounters(**{name: getattr(self._counters, name) for name in StoreCounters.__slots__})
