"""Between slots and the store: what of a snapshot is written, and how one is put together again.

Must not know: sequences, the order of requests. For models with attention a stored snapshot holds the KV of the tokens
since its parent, so that a chain of parents gives the whole KV; a chain with a gap is stranded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from apcbatch.engine.pages import NO_PAGES, PageArray, PagePool
from apcbatch.engine.pool import Snapshot, SnapshotPool
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.arena import StateArena
from apcbatch.store import Store, StoredSnapshot


@dataclass(frozen=True)
class Stranded:
    """A stored snapshot whose chain of parents is incomplete: nothing at or after `position` can be used."""

    position: int


class Persistence:
    """One model's snapshots in a store."""

    def __init__(self, store: Store, arena: StateArena, fingerprint: bytes, model_name: str) -> None:
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
        parts = self._arena.host_slot(snapshot.slot, copied=True)
        if self._has_kv:
            begin, pages = parent[1] if parent else 0, torch.from_numpy(snapshot.pages)
            parts |= self._arena.gather(pages, begin, snapshot.position)
        snapshot.pins += 1
        self._writing[snapshot.key] = snapshot
        snapshot.stored = self._store.put(
            snapshot.key,
            snapshot.position,
            parent,
            self._fingerprint,
            _arrays(parts),
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
        return self._assemble(base, list(chain.links), pool, pages, awaited)

    def _load_state(self, key: bytes, pool: SnapshotPool, awaited: bool) -> Snapshot | None:
        """A snapshot without KV, read straight into its slot, which stays hidden until every byte is verified."""
        slot = pool.reserve(key, awaited)
        if slot is None:
            return None
        host = self._arena.host_slot(slot, copied=False)
        stored = self._store.get(key, self._fingerprint, into=_arrays(host))
        if stored is None:
            pool.cancel(slot)
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

    def _assemble(
        self,
        base: Snapshot | None,
        links: list[StoredSnapshot],
        pool: SnapshotPool,
        pages: PagePool,
        awaited: bool,
    ) -> Snapshot | None:
        """One pool entry from a chain: KV of every link after `base`, recurrent state of the last one."""
        last = links[-1]
        if base is not None:
            base.pins += 1
        slot = pool.reserve(last.key, awaited)
        table = None if slot is None else self._chain_pages(base, last.position, pages)
        if base is not None:
            base.pins -= 1
        if slot is None:
            return None
        if table is None:
            pool.cancel(slot)
            return None
        for link in links if self._has_kv else ():
            self._arena.scatter(torch.from_numpy(table), link.parent_position, _tensors(link.arrays))
        self._arena.fill_slot(slot, _tensors(last.arrays))
        snapshot = pool.insert(last.key, last.position, slot, table, awaited=awaited)
        if snapshot is not None:
            snapshot.stored = True
        pages.release(table)  # the pool holds its own references now
        return snapshot

    def _chain_pages(self, base: Snapshot | None, end: int, pages: PagePool) -> PageArray | None:
        """Pages for `end` tokens: those of `base` shared, its partial one copied, the rest new; None for no room."""
        if not self._has_kv:
            return NO_PAGES
        full = base.pages[: base.position // PAGE_TOKENS] if base else NO_PAGES
        missing = -(-end // PAGE_TOKENS) - len(full)
        if pages.num_free < missing:
            return None
        pages.share(full)
        added = np.array([pages.allocate() for _ in range(missing)], np.int64)
        if base is not None and len(full) < len(base.pages):
            self._arena.copy_page(int(base.pages[-1]), int(added[0]))
        return np.concatenate([full, added])


def _arrays(parts: Mapping[str, torch.Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Tensors as the store takes them, by role: on the host, bfloat16 as its 16 bits; views where that is possible."""
    host = {role: tensor.cpu() for role, tensor in parts.items()}
    return {
        role: (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for role, tensor in host.items()
    }


def _tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    """What the store gives, by role, as tensors of the arena's dtypes."""
    tensors = {role: torch.from_numpy(array) for role, array in arrays.items()}
    return {
        role: tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
        for role, tensor in tensors.items()
    }
