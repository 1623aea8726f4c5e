"""Between slots and the store: what of a snapshot is written, and when it is there again.

Must not know: sequences, the order of requests. For models with attention a stored snapshot holds the KV of the tokens
since its parent, so that a chain of parents gives the whole KV; a chain with a gap is stranded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from apcbatch.engine.assembly import as_arrays, assemble, parts_of
from apcbatch.engine.pages import NO_PAGES, PagePool
from apcbatch.engine.pool import Snapshot, SnapshotPool
from apcbatch.model.spread_arena import Arena
from apcbatch.store import Store


@dataclass(frozen=True)
class Stranded:
    """A stored snapshot whose chain of parents is incomplete: nothing at or after `position` can be used."""

    position: int


class Persistence:
    """One model's snapshots in a store."""

    def __init__(self, store: Store, arena: Arena, fingerprint: bytes, model_name: str) -> None:
        self._store, self._arena, self._fingerprint = store, arena, fingerprint
        self._has_kv = arena.layout.has_tokens
        self._writing: dict[bytes, Snapshot] = {}
        self._done: deque[tuple[bytes, bool]] = deque()  # filled by the store's writer thread
        store.register(fingerprint, model_name, arena.layout.stored())

    def positions(self, keys: dict[int, bytes]) -> list[int]:
        """Which of the positions the store holds."""
        present = self._store.present(list(keys.values()))
        return [position for position, key in keys.items() if key in present]

    def save(self, snapshot: Snapshot, parent: tuple[bytes, int] | None) -> bool:
        """Queue a snapshot for writing; it stays pinned until that is done. False where it was not taken."""
        if snapshot.key in self._writing:
            return True
        parts = parts_of(self._arena, snapshot, parent[1] if parent else 0)
        snapshot.pins += 1
        self._writing[snapshot.key] = snapshot
        snapshot.stored = self._store.put(
            snapshot.key,
            snapshot.position,
            parent,
            self._fingerprint,
            as_arrays(parts),
            lambda key, is_stored: self._done.append((key, is_stored)),
        )
        if not snapshot.stored:
            self._written(snapshot.key, False)
        return snapshot.stored

    def touch(self, snapshot: Snapshot) -> None:
        """Note for the store's eviction that a snapshot was consumed."""
        if snapshot.stored:
            self._store.touch(snapshot.key)

    def drain(self) -> None:
        """Unpin what has been written since the last call."""
        while self._done:
            self._written(*self._done.popleft())

    def wait(self) -> bool:
        """Wait for all writes; False where none was under way."""
        if not self._writing:
            return False
        self._store.flush()
        self.drain()
        return True

    def load(self, key: bytes, pool: SnapshotPool, pages: PagePool, awaited: bool) -> Snapshot | Stranded | None:
        """Bring a stored snapshot into the pool; None where the store cannot give it or there is no room.

        awaited: as in SnapshotPool.reserve.
        """
        if not self._has_kv:
            return self._load_state(key, pool, awaited)
        chain = self._store.get_chain(key, self._fingerprint, held=pool)
        if not chain.links:
            return Stranded(chain.stranded_at) if chain.miss == "stranded" else None
        first = chain.links[0]
        base = pool.peek(first.parent) if first.parent is not None else None
        if first.parent_position and base is None:
            return Stranded(first.parent_position)
        snapshot = assemble(self._arena, pool, pages, base, chain.links, awaited=awaited)
        if snapshot is not None:
            snapshot.stored = True
        return snapshot

    def _load_state(self, key: bytes, pool: SnapshotPool, awaited: bool) -> Snapshot | None:
        """A snapshot without KV, read straight into its slot, which stays hidden until every byte is verified."""
        slot = pool.reserve(key, awaited)
        if slot is None:
            return None
        host = self._arena.host_slot(slot, copied=False)
        stored = self._store.get(key, self._fingerprint, into=as_arrays(host))
        if stored is None:
            pool.cancel(key, slot)
            return None
        self._arena.fill_slot(slot, host)
        snapshot = pool.insert(key, stored.position, slot, NO_PAGES, awaited=awaited)
        if snapshot is not None:
            snapshot.stored = True
        return snapshot

    def _written(self, key: bytes, is_stored: bool) -> None:
        snapshot = self._writing.pop(key)
        snapshot.pins -= 1
        snapshot.stored = is_stored
