"""SnapshotReader: finds, reads and verifies snapshots. Snapshots that cannot be used are hidden and reported.

Nothing is raised for a fault of the disk or of the index.
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

    links: from the first ancestor that is needed to the snapshot itself; ancestors hold their `kv` alone. Without
    `kv` tensors the snapshot is the only link. miss: why there are no links: the snapshot is `missing`, or an ancestor
    of it is (`stranded`); then no snapshot at or after the position stranded_at, in tokens, can be used on this path.
    """

    links: tuple[StoredSnapshot, ...]
    miss: ChainMiss | None = None
    stranded_at: int = 0


class SnapshotReader:
    """Reads from one store. index: None if it cannot be read; then nothing is found. on_suspect: called with the key
    and fingerprint of a snapshot that could not be used, if the store can be written."""

    def __init__(self, index: Index | None, folder: SnapshotFolder, status: Status) -> None:
        self.index = index
        self.on_suspect: Callable[[bytes, bytes], None] | None = None
        self._folder = folder
        self._status = status
        self._hidden: set[bytes] = set()
        self._is_index_damaged = False

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        """Those of the keys that the index has and that are not hidden."""
        if self.index is None or self._is_index_damaged:
            return set()
        try:
            return self.index.present(keys) - self._hidden
        except IndexFault as error:
            self._is_index_damaged = isinstance(error, IndexDamaged)
            self._status.failure(error, "reading the index")
            return set()

    def get_chain(self, key: bytes, fingerprint: bytes, held: Container[bytes]) -> Chain:
        """The snapshot and the KV of its ancestors up to the nearest that the caller holds."""
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
        """Stop hiding a snapshot that was checked again: the index is right about it now."""
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
        """The verified snapshot, read into the given arrays, or only its named tensors; None if it is missing or
        bad."""
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
        """Hide a snapshot that cannot be used, and have it checked again and removed. fault: None for a missing
        file."""
        self._hidden.add(key)
        if fault is not None:
            self._status.bad_snapshot(key, fault)
        if self.on_suspect is not None:
            self.on_suspect(key, fingerprint)
