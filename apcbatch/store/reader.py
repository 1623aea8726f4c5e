"""SnapshotReader: finds, reads and verifies snapshots. Snapshots that cannot be used are hidden and reported.

No fault of the disk or of the index raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from apcbatch.store.database import IndexDamaged, IndexFault
from apcbatch.store.format import Array, BadSnapshot
from apcbatch.store.index import Index
from apcbatch.store.snapshot_file import SnapshotFolder, StoredSnapshot, check_link, token_names
from apcbatch.store.status import Status

ChainMiss = Literal["missing", "stranded"]


@dataclass(frozen=True, slots=True)
class Chain:
    """A snapshot with the ancestors that it needs.

    links: from the first needed ancestor to the snapshot itself; of ancestors only the `kv` tensors are read. Without
    `kv` tensors the snapshot is the only link. miss: None, or why links is empty: `missing` if the snapshot itself
    cannot be read, `stranded` if one of its ancestors cannot be read or does not fit its child. stranded_at: position
    in tokens; if stranded, no snapshot at or after it on this path can be used.
    """

    links: tuple[StoredSnapshot, ...]
    miss: ChainMiss | None = None
    stranded_at: int = 0


class SnapshotReader:
    """Reads snapshots from one store.

    index: None if it cannot be read; then no snapshot is found. on_suspect: called with the key and fingerprint of a
    snapshot that could not be used; None if the store cannot be written.
    """

    def __init__(self, index: Index | None, folder: SnapshotFolder, status: Status) -> None:
        self.index = index
        self.on_suspect: Callable[[bytes, bytes], None] | None = None
        self._folder, self._status = folder, status
        self._hidden: set[bytes] = set()
        self._is_index_damaged = False

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        """Return the keys that the index has and that are not hidden."""
        if self.index is None or self._is_index_damaged:
            return set()
        try:
            return self.index.present(keys) - self._hidden
        except IndexFault as error:
            self._is_index_damaged = isinstance(error, IndexDamaged)
            self._status.failure(error, "reading the index")
            return set()

    def get_chain(self, key: bytes, fingerprint: bytes, held: Container[bytes]) -> Chain:
        """Read a snapshot, and the KV of its ancestors after the nearest one that the caller holds."""
        last = self.get(key, fingerprint)
        if last is None:
            return Chain((), "missing")
        links = [last]
        names = token_names(last)
        while names and links[-1].parent is not None and links[-1].parent not in held:
            child = links[-1]
            parent = self.get(links[-1].parent, fingerprint, names=names)
            if parent is None:
                return Chain((), "stranded", child.parent_position)
            try:
                check_link(child, parent)
            except BadSnapshot as error:
                self._hide(child.key, fingerprint, str(error))
                return Chain((), "stranded", child.position)
            links.append(parent)
        return Chain(tuple(reversed(links)))

    def reveal(self, key: bytes) -> None:
        """Stop hiding a snapshot that was checked again; its row in the index is now correct."""
        self._hidden.discard(key)

    def close(self) -> None:
        if self.index is not None:
            self.index.close()
            self.index = None

    def get(
        self,
        key: bytes,
        fingerprint: bytes,
        into: Mapping[str, Array] | None = None,
        names: Sequence[str] | None = None,
    ) -> StoredSnapshot | None:
        """Read and verify a snapshot. Return None if it is missing or bad.

        into: arrays to read the tensors into. names: the tensors to read; None for all.
        """
        if key in self._hidden:
            return None
        try:
            snapshot = self._folder.read(key, fingerprint, names, into)
        except FileNotFoundError:
            if self.present([key]):
                self._hide(key, fingerprint, None)
            return None
        except BadSnapshot as error:
            self._hide(key, fingerprint, str(error))
            return None
        except OSError as error:
            self._hidden.add(key)
            self._status.failure(error, "reading a snapshot")
            return None
        self._status.count(read=1, bytes_read=sum(array.nbytes for array in snapshot.arrays.values()))
        return snapshot

    def _hide(self, key: bytes, fingerprint: bytes, fault: str | None) -> None:
        """Hide a snapshot that cannot be used, and report it to be checked again and removed. fault: None for a missing
        file."""
        self._hidden.add(key)
        if fault is not None:
            self._status.bad_snapshot(key, fault)
        if self.on_suspect is not None:
            self.on_suspect(key, fingerprint)
