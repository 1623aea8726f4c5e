"""Check: verify every file of a store, and make the index and the files agree again.

Other processes may use the store meanwhile. Each step holds the index's write lock only briefly, and verifies its
finding again under the lock before it changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from apcbatch.store.database import Entry, row_id
from apcbatch.store.format import BadSnapshot, Header
from apcbatch.store.index import Index
from apcbatch.store.repair import faults
from apcbatch.store.snapshot_file import SnapshotFolder

ROWS_PER_STEP = 256


@dataclass(slots=True)
class CheckReport:
    """Findings and changes of one check.

    faults: one clause per fault found. num_verified, num_bytes: intact files and their size. num_stranded: intact
    snapshots without their parent, which can be used once it is stored again.

    num_adopted: intact files entered in the index. num_rows_dropped, num_files_removed: rows and files removed. These
    are 0 in a read-only store.
    """

    num_verified: int = 0
    num_bytes: int = 0
    faults: list[str] = field(default_factory=list)
    num_adopted: int = 0
    num_rows_dropped: int = 0
    num_files_removed: int = 0
    num_stranded: int = 0


class Checker:
    """One check of a store. index: None for a read-only store, in which nothing is changed."""

    def __init__(self, reader: Index, index: Index | None, folder: SnapshotFolder) -> None:
        self._reader, self._index, self._folder = reader, index, folder
        self._report = CheckReport()

    def run(self) -> CheckReport:
        """Check every row and every file."""
        self._report.faults += [f"index: {fault}" for fault in faults(self._reader.database)]
        for entry in _entries(self._reader):  # before the files: a row with a wrong key blocks the right one
            if not self._folder.exists(entry.key):
                self._drop_row(entry.key)
        for key in self._folder.all_keys():
            self._check_file(key)
        for path in self._folder.strangers():
            self._report.faults.append(f"{path}: not a snapshot's name; it is left alone")
        if self._index is not None:
            with self._index.transaction():
                self._index.recount()
        self._report.num_stranded = self._reader.num_stranded()
        return self._report

    def _check_file(self, key: bytes) -> None:
        """Verify one file. Remove it if it is bad, and enter it if its row is missing or wrong."""
        try:
            self._folder.read(key)
            header = self._folder.header(key)
            num_bytes = self._folder.size(key)
        except FileNotFoundError:
            return  # evicted meanwhile
        except BadSnapshot as error:
            self._report.faults.append(f"{self._folder.path(key)}: {error}")
            self._remove_bad(key)
            return
        except OSError as error:
            self._report.faults.append(f"{self._folder.path(key)}: it cannot be read ({error})")
            return
        self._report.num_verified += 1
        self._report.num_bytes += num_bytes
        entry = self._reader.find(key)
        if entry is None or _differs(entry, header, num_bytes):
            self._enter(header, num_bytes)

    def _remove_bad(self, key: bytes) -> None:
        """Remove a bad file and its row, unless another process has replaced the file with a good one."""
        if self._index is None:
            return
        with self._index.transaction():
            try:
                self._folder.read(key)
            except BadSnapshot:
                self._index.delete(key)
                self._report.num_files_removed += self._folder.remove(key)
            except OSError:
                return

    def _enter(self, header: Header, num_bytes: int) -> None:
        """Enter an intact file whose row is missing or wrong."""
        if self._index is None:
            self._report.faults.append(f"{self._folder.path(header.key)}: the index has no such row")
            return
        with self._index.transaction():
            entry = self._index.find(header.key)
            if entry is not None and not _differs(entry, header, num_bytes):
                return
            if not self._folder.exists(header.key):
                return
            self._report.faults.append(f"{self._folder.path(header.key)}: the index has no such row")
            self._index.delete(header.key)
            if not self._index.sharing([header.key]):
                model = self._index.model_id(header.fingerprint, None)
                self._index.insert(header, num_bytes, model, self._folder.modified(header.key))
                self._report.num_adopted += 1

    def _drop_row(self, key: bytes) -> None:
        """Drop the row of a missing file."""
        if self._index is None:
            self._report.faults.append(f"{self._folder.path(key)}: missing, but in the index")
            return
        with self._index.transaction():
            if self._index.find(key) is not None and not self._folder.exists(key):
                self._report.faults.append(f"{self._folder.path(key)}: missing, but in the index")
                self._index.delete(key)
                self._report.num_rows_dropped += 1


def _entries(index: Index) -> Iterator[Entry]:
    """Yield all rows by ascending id, reading ROWS_PER_STEP at a time."""
    last: int | None = None
    while entries := index.entries_after(last, ROWS_PER_STEP):
        yield from entries
        last = row_id(entries[-1].key)


def _differs(entry: Entry, header: Header, num_bytes: int) -> bool:
    """Return whether a row disagrees with its file."""
    parent = row_id(header.parent) if header.parent else None
    found = entry.position, entry.parent_id, entry.parent_position, entry.num_bytes
    return found != (header.position, parent, header.parent_position, num_bytes)
