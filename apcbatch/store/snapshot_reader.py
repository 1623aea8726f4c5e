"""SnapshotReader: finds, reads and verifies snapshots; what cannot be used is hidden and reported, never
handed out.

Must not know: how snapshots are written. Nothing is raised for a fault of the disk or of the index.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from apcbatch.layout import Layout
from apcbatch.store.counters import Tally
from apcbatch.store.database import IndexDamaged, IndexFault
from apcbatch.store.header import Array, BadSnapshot
from apcbatch.store.index import Index
from apcbatch.store.notices import Notices
from apcbatch.store.objects import Objects, check_link, token_names
from apcbatch.store.snapshot_file import StoredSnapshot

ChainMiss = Literal["missing", "stranded"]


@dataclass(frozen=True, slots=True)
class Chain:
    """The way to one snapshot.

    links: from the first ancestor that is needed to the snapshot itself, which is the last one; the others
    hold their `kv` and nothing else. Without `kv` tensors the snapshot is the only link. miss: why there are
    no links: the snapshot is not there (`missing`), or an ancestor of it is not (`stranded`); then nothing at
    or after the position stranded_at, in tokens, can be used on this way.
    """

    links: tuple[StoredSnapshot, ...]
    miss: ChainMiss | None = None
    stranded_at: int = 0


class SnapshotReader:
    """Reads from one store; index is None where that cannot be read, and then nothing is found."""

    def __init__(
        self,
        index: Index | None,
        objects: Objects,
        layouts: Mapping[bytes, Layout],
        tally: Tally,
        notices: Notices,
    ) -> None:
        self.index = index
        self.on_doubt: Callable[[bytes, bytes], None] | None = None
        self._objects = objects
        self._layouts = layouts
        self._tally = tally
        self._notices = notices
        self._hidden: set[bytes] = set()
        self._is_index_damaged = False

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        """Those of the keys that the index has and that did not prove unusable."""
        if self.index is None or self._is_index_damaged:
            return set()
        try:
            return self.index.present(keys) - self._hidden
        except IndexFault as error:
            self._is_index_damaged = isinstance(error, IndexDamaged)
            self._notices.failure(error, "reading the index")
            return set()

    def get(self, key: bytes, fingerprint: bytes, into: Mapping[str, Array] | None = None) -> StoredSnapshot | None:
        """The verified snapshot, read into the given arrays; None where it is missing or bad."""
        return self._read(key, fingerprint, None, into)

    def get_chain(self, key: bytes, fingerprint: bytes, held: Container[bytes]) -> Chain:
        """The snapshot and the KV of its ancestors up to the nearest that the caller holds."""
        last = self._read(key, fingerprint, None)
        if last is None:
            return Chain((), "missing")
        links = [last]
        names = token_names(last)
        while names and links[-1].parent is not None and links[-1].parent not in held:
            child = links[-1]
            parent = self._read(links[-1].parent, fingerprint, names)
            if parent is None:
                return Chain((), "stranded", child.parent_position)
            try:
                check_link(child, parent)
            except BadSnapshot as error:
                self._doubt(child.key, fingerprint, str(error))
                return Chain((), "stranded", child.position)
            links.append(parent)
        return Chain(tuple(reversed(links)))

    def reveal(self, key: bytes) -> None:
        """The doubt about a snapshot is resolved: what the index says of it holds again."""
        self._hidden.discard(key)

    def close(self) -> None:
        if self.index is not None:
            self.index.close()
            self.index = None

    def _read(
        self,
        key: bytes,
        fingerprint: bytes,
        names: Sequence[str] | None,
        into: Mapping[str, Array] | None = None,
    ) -> StoredSnapshot | None:
        if key in self._hidden:
            return None
        try:
            snapshot = self._objects.read(key, fingerprint, self._layouts, names, into)
        except FileNotFoundError:
            if self.present([key]):
                self._doubt(key, fingerprint, None)
            return None
        except BadSnapshot as error:
            self._doubt(key, fingerprint, str(error))
            return None
        except OSError as error:
            self._hidden.add(key)
            self._notices.failure(error, "reading a snapshot")
            return None
        self._tally.add(read=1, bytes_read=sum(array.nbytes for array in snapshot.arrays.values()))
        return snapshot

    def _doubt(self, key: bytes, fingerprint: bytes, clause: str | None) -> None:
        """Hide a snapshot that cannot be used, and have it removed if it proves so."""
        self._hidden.add(key)
        if clause is not None:
            self._tally.add(bad=1)
            self._notices.bad_snapshot(key, clause)
        if self.on_doubt is not None:
            self.on_doubt(key, fingerprint)
