"""Eviction: remove the least valuable snapshots so that the size limit always holds; and `store prune`.

The least valuable snapshot without children is evicted first, so an ancestor always outlives its descendants.

Value: (position - parent's position) / bytes * (uses + 1) + clock. The first factor is the number of tokens that one
byte of the snapshot saves. clock is the highest value evicted before the snapshot's last use. So unused snapshots
gradually lose against newer ones, without a tuned parameter. Source: greedy-dual-size-frequency (Cherkasova, "Improving
WWW proxies performance with greedy-dual-size-frequency caching policy", 1998).

Each transaction is short, since other processes may use the store meanwhile.
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
    """Counts and bytes of the snapshots that a prune removed, and of those left."""

    num_removed: int
    num_bytes_removed: int
    num_left: int
    num_bytes_left: int


def evict_one(index: Index, folder: SnapshotFolder, protected: set[bytes]) -> Entry | None:
    """Remove the least valuable snapshot that is not protected. Return it, or None if all are protected.

    The caller must be inside a transaction of the index.
    """
    victim = index.least_valuable(protected)
    if victim is not None:
        index.advance_clock(victim.priority)
        drop(victim, index, folder)
    return victim


def drop(entry: Entry, index: Index, folder: SnapshotFolder) -> None:
    """Remove the row and the file of a snapshot just found in the index.

    If the row's key has no file, the key may be damaged. Then the file is the one whose name begins with the row's id,
    which is the key's first 8 bytes.
    """
    index.remove(entry)
    if not folder.remove(entry.key):
        folder.remove_namesakes(entry.key)


class Capacity:
    """Bytes left below the size limit, during one transaction. Bytes that any process has reserved count as used.

    num_evicted: number of snapshots evicted so far.
    """

    def __init__(self, index: Index, folder: SnapshotFolder, limit_bytes: int, protected: set[bytes]) -> None:
        """protected: keys that must not be evicted."""
        self.num_evicted = 0
        self._index, self._folder, self._protected = index, folder, protected
        self._most_bytes = limit_bytes - index.reserved_bytes()
        self._free_bytes = self._most_bytes - index.totals()[1]

    def take(self, num_bytes: int) -> bool:
        """Take num_bytes, evicting snapshots if needed. Return False if they do not fit.

        If evicting every snapshot could not make enough room, none is evicted.
        """
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
    """Evict the least valuable snapshots until at most size_bytes are left, and drop those unused for older_than_s
    seconds.

    model: name of a model, or the start of its fingerprint in hex. Only its snapshots are dropped by age; without an
    age, all of them are dropped. None: all models. An ancestor stays while a descendant does.

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
        now = time.time()
        unused_since = None if older_than_s is None else now - older_than_s
        if older_than_s is not None:
            with index.transaction():
                index.forget_future(now)
        for model_id in models:
            _drop_unused(index, folder, model_id, unused_since)
    after = index.totals()
    return PruneReport(before[0] - after[0], before[1] - after[1], *after)


def _evict_down_to(index: Index, folder: SnapshotFolder, size_bytes: int) -> None:
    """Evict until the store has at most size_bytes.

    At most as many snapshots are evicted as the store had at the beginning. Those that other processes add meanwhile
    are subject to their own limits.
    """
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
    """Drop the snapshots last used at unused_since or before (None: at any time), of one model or of all (None).

    At most as many are dropped as the store had at the beginning.
    """
    left = index.totals()[0]
    while left > 0:
        with index.transaction():
            entries = index.leaves(model, unused_since, ROWS_PER_TRANSACTION)
            for entry in entries:
                drop(entry, index, folder)
        if not entries:
            return
        left -= len(entries)
