"""Eviction: remove the least valuable snapshots, so that the size limit holds at every instant; and `store prune`.

The least valuable snapshot without children is evicted first, so an ancestor always outlives its descendants. A
snapshot's value is the tokens that one byte of it saves, (position - parent's position) / bytes, times its uses + 1,
plus the highest value that had been evicted when it was last used (greedy-dual-size-frequency: Cherkasova, "Improving
WWW proxies performance with greedy-dual-size-frequency caching policy", 1998). So unused snapshots lose against newer
ones step by step, without a tuned parameter. Each transaction is short: other processes may use the store meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from apcbatch.errors import UsageError
from apcbatch.store.database import Entry
from apcbatch.store.index import Index
from apcbatch.store.snapshot_file import SnapshotFolder

ROWS_PER_TRANSACTION = 256


@dataclass(slots=True)
class PruneReport:
    """What a prune removed, and what is left."""

    num_removed: int
    num_bytes_removed: int
    num_left: int
    num_bytes_left: int


def evict_one(index: Index, folder: SnapshotFolder, protected: set[bytes]) -> Entry | None:
    """Remove the least valuable snapshot inside a transaction and return it; None if all are protected."""
    victim = index.least_valuable(protected)
    if victim is not None:
        index.advance_clock(victim.priority)
        drop(victim, index, folder)
    return victim


def drop(entry: Entry, index: Index, folder: SnapshotFolder) -> None:
    """Remove a snapshot just found in the index, row and file. If the row's key has no file, the key may be damaged:
    then the file whose name begins with the row's id, the key's first 8 bytes, is the one that was counted."""
    index.remove(entry)
    if not folder.remove(entry.key):
        folder.remove_namesakes(entry.key)


class Capacity:
    """The bytes left below the size limit, with the bytes that every process is writing counted. For one transaction.

    num_evicted: snapshots evicted so far."""

    def __init__(self, index: Index, folder: SnapshotFolder, limit_bytes: int, protected: set[bytes]) -> None:
        """protected: keys that must not be evicted."""
        self.num_evicted = 0
        self._index = index
        self._folder = folder
        self._protected = protected
        self._most_bytes = limit_bytes - index.reserved_bytes()
        self._free_bytes = self._most_bytes - index.totals()[1]

    def take(self, num_bytes: int) -> bool:
        """Take num_bytes, evicting snapshots if needed; False, with nothing evicted, if they can never fit."""
        if num_bytes > self._most_bytes:
            return False
        while self._free_bytes < num_bytes:
            victim = evict_one(self._index, self._folder, self._protected)
            if victim is None:
                return False
            self._free_bytes += victim.num_bytes
            self.num_evicted += 1
        self._most_bytes -= num_bytes
        self._free_bytes -= num_bytes
        return True


def prune(
    index: Index,
    folder: SnapshotFolder,
    size_bytes: int | None = None,
    older_than_s: float | None = None,
    model: str | None = None,
) -> PruneReport:
    """Drop snapshots until the store has at most size_bytes, and those unused for older_than_s seconds, of one model
    (its name, or the start of its fingerprint in hex) or of all. An ancestor stays while a descendant does.

    Raises UsageError for an unknown model, and if neither a size, an age nor a model is given.
    """
    if size_bytes is None and older_than_s is None and model is None:
        raise UsageError("nothing says what to drop; give a size, an age or a model")
    models: list[int | None] = [None]
    if model is not None:
        models = [*index.model_ids(model)]
        if not models:
            known = ", ".join(stats.name or stats.fingerprint[:12] for stats in index.models(time.time())) or "none"
            raise UsageError(f"the store has no model {model!r}; it has: {known}")
    before = index.totals()
    if size_bytes is not None:
        _evict_down_to(index, folder, size_bytes)
    if older_than_s is not None or model is not None:
        unused_since = None
        if older_than_s is not None:
            now = time.time()
            unused_since = now - older_than_s
            with index.transaction():
                index.forget_future(now)
        for model_id in models:
            _drop_unused(index, folder, model_id, unused_since)
    after = index.totals()
    return PruneReport(before[0] - after[0], before[1] - after[1], *after)


def _evict_down_to(index: Index, folder: SnapshotFolder, size_bytes: int) -> None:
    """Evict until the store has at most size_bytes. At most as many snapshots are evicted as there are at the
    beginning: those that other processes add meanwhile are kept below their own limits."""
    left = index.totals()[0]
    while left > 0:
        with index.transaction():
            for _ in range(min(left, ROWS_PER_TRANSACTION)):
                if index.totals()[1] <= size_bytes:
                    return
                if evict_one(index, folder, set()) is None:
                    entry = index.deepest()
                    if entry is None:
                        return
                    drop(entry, index, folder)
        left -= ROWS_PER_TRANSACTION


def _drop_unused(index: Index, folder: SnapshotFolder, model: int | None, unused_since: float | None) -> None:
    """Drop the snapshots of a model, or of all, last used at unused_since or before. Bounded as _evict_down_to."""
    left = index.totals()[0]
    while left > 0:
        with index.transaction():
            entries = index.leaves(model, unused_since, ROWS_PER_TRANSACTION)
            for entry in entries:
                drop(entry, index, folder)
        if not entries:
            return
        left -= len(entries)
