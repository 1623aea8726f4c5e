"""Maintenance: verifies every file of a store, brings index and files together again, and drops what is not
wanted.

Must not know: a running engine. Other processes may use the store meanwhile: each step holds the index's
write lock only for a moment, and looks again under it before anything is changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from apcbatch.errors import UsageError
from apcbatch.store.entry import Entry, row_id
from apcbatch.store.eviction import drop, evict_one
from apcbatch.store.header import BadSnapshot, Header
from apcbatch.store.index import Index
from apcbatch.store.objects import Objects

ROWS_A_STEP = 256


@dataclass(slots=True)
class CheckReport:
    """What a check found. faults: one clause each. The counts say what was done about them (0 in a read-only
    store).

    stranded: whole snapshots that wait for a parent; they are used again when it is stored again.
    """

    num_verified: int = 0
    num_bytes: int = 0
    faults: list[str] = field(default_factory=list)
    num_adopted: int = 0
    num_rows_dropped: int = 0
    num_files_removed: int = 0
    num_stranded: int = 0


@dataclass(slots=True)
class PruneReport:
    """What a prune removed, and what is left."""

    num_removed: int
    num_bytes_removed: int
    num_left: int
    num_bytes_left: int


class Checker:
    """One check of a store; index is None for a store that is only read, and then nothing is changed."""

    def __init__(self, reader: Index, index: Index | None, objects: Objects) -> None:
        self._reader = reader
        self._index = index
        self._objects = objects
        self._report = CheckReport()

    def run(self) -> CheckReport:
        self._report.faults += [f"index: {fault}" for fault in self._reader.faults()]
        for entry in _entries(self._reader):  # first: a row with a wrong key would keep the right one out
            if not self._objects.exists(entry.key):
                self._drop_row(entry.key)
        for key in self._objects.all_keys():
            self._check_file(key)
        for path in self._objects.strangers():
            self._report.faults.append(f"{path}: not a snapshot's name; it is left alone")
        if self._index is not None:
            with self._index.transaction():
                self._index.recount()
        self._report.num_stranded = self._reader.num_stranded()
        return self._report

    def _check_file(self, key: bytes) -> None:
        try:
            self._objects.read(key)
            header = self._objects.header(key)
            num_bytes = self._objects.size(key)
        except FileNotFoundError:
            return  # evicted meanwhile
        except BadSnapshot as error:
            self._report.faults.append(f"{self._objects.path(key)}: {error}")
            self._remove_bad(key)
            return
        except OSError as error:
            self._report.faults.append(f"{self._objects.path(key)}: it cannot be read ({error})")
            return
        self._report.num_verified += 1
        self._report.num_bytes += num_bytes
        entry = self._reader.find(key)
        if entry is None or _differs(entry, header, num_bytes):
            self._enter(header, num_bytes)

    def _remove_bad(self, key: bytes) -> None:
        """Remove a bad file with its row, unless somebody has put a good one in its place."""
        if self._index is None:
            return
        with self._index.transaction():
            try:
                self._objects.read(key)
            except BadSnapshot:
                self._index.delete(key)
                self._report.num_files_removed += self._objects.remove(key)
            except OSError:
                return

    def _enter(self, header: Header, num_bytes: int) -> None:
        """Give a whole file the row that it should have."""
        if self._index is None:
            self._report.faults.append(f"{self._objects.path(header.key)}: the index has no such row")
            return
        with self._index.transaction():
            entry = self._index.find(header.key)
            if entry is not None and not _differs(entry, header, num_bytes):
                return
            if not self._objects.exists(header.key):
                return
            self._report.faults.append(f"{self._objects.path(header.key)}: the index has no such row")
            self._index.delete(header.key)
            if not self._index.sharing([header.key]):
                model = self._index.model_id(header.fingerprint, None)
                self._index.insert(header, num_bytes, model, self._objects.modified(header.key))
                self._report.num_adopted += 1

    def _drop_row(self, key: bytes) -> None:
        if self._index is None:
            self._report.faults.append(f"{self._objects.path(key)}: missing, but in the index")
            return
        with self._index.transaction():
            if self._index.find(key) is not None and not self._objects.exists(key):
                self._report.faults.append(f"{self._objects.path(key)}: missing, but in the index")
                self._index.delete(key)
                self._report.num_rows_dropped += 1


def prune(
    index: Index,
    objects: Objects,
    size_bytes: int | None = None,
    older_than_s: float | None = None,
    model: str | None = None,
) -> PruneReport:
    """Drop snapshots until the store has at most size_bytes, and all those not used for older_than_s seconds,
    of one model (its name, or the start of its fingerprint in hex) or of all. An ancestor stays while a
    descendant does.

    Raises UsageError where no model is called so, and where nothing says what to drop.
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
        _shrink(index, objects, size_bytes)
    if older_than_s is not None or model is not None:
        unused_since = None
        if older_than_s is not None:
            now = time.time()
            unused_since = now - older_than_s
            with index.transaction():
                index.forget_future(now)
        for model_id in models:
            _drop(index, objects, model_id, unused_since)
    after = index.totals()
    return PruneReport(before[0] - after[0], before[1] - after[1], *after)


def _shrink(index: Index, objects: Objects, size_bytes: int) -> None:
    """Each eviction removes one row, and there are as many at most as rows at the beginning: what other
    processes add meanwhile is theirs to keep below their limits."""
    left = index.totals()[0]
    while left > 0:
        with index.transaction():
            for _ in range(min(left, ROWS_A_STEP)):
                if index.totals()[1] <= size_bytes:
                    return
                if evict_one(index, objects, set()) is None:
                    entry = index.deepest()
                    if entry is None:
                        return
                    drop(entry, index, objects)
        left -= ROWS_A_STEP


def _drop(index: Index, objects: Objects, model: int | None, unused_since: float | None) -> None:
    """Bounded as _shrink is: each entry removes one row."""
    left = index.totals()[0]
    while left > 0:
        with index.transaction():
            entries = index.leaves(model, unused_since, ROWS_A_STEP)
            for entry in entries:
                drop(entry, index, objects)
        if not entries:
            return
        left -= len(entries)


def _entries(index: Index) -> Iterator[Entry]:
    """All rows, by ascending ids: so each step begins after the one before, and there is a last one."""
    last: int | None = None
    while entries := index.entries_after(last, ROWS_A_STEP):
        yield from entries
        last = row_id(entries[-1].key)


def _differs(entry: Entry, header: Header, num_bytes: int) -> bool:
    parent = row_id(header.parent) if header.parent else None
    return (entry.position, entry.parent_id, entry.parent_position, entry.num_bytes) != (
        header.position,
        parent,
        header.parent_position,
        num_bytes,
    )
