"""Between slots and the store: what of a snapshot is written, and how one is put together again.

Must not know: sequences, the order of requests. For models with attention a stored snapshot holds the KV of the tokens
since its parent, so that a chain of parents gives the whole KV; a chain with a gap is stranded.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from apcbatch.engine.pages import NO_PAGES, PageArray, PagePool
from apcbatch.engine.pool import Snapshot, SnapshotPool
from apcbatch.model.state import PAGE_TOKENS, StateArena
from apcbatch.store import Store, StoredSnapshot


class Stranded:
    """A stored snapshot whose chain of parents is incomplete."""


class Persistence:
    """One model's snapshots in a store."""

    def __init__(self, store: Store, arena: StateArena, fingerprint: bytes, has_kv: bool) -> None:
        self._store, self._arena = store, arena
        self._fingerprint, self._has_kv = fingerprint, has_kv
        self._writing: dict[bytes, Snapshot] = {}
        self._done: deque[tuple[bytes, bool]] = deque()  # filled by the store's writer thread

    def positions(self, keys: dict[int, bytes]) -> list[int]:
        """Which of the positions the store holds."""
        present = self._store.present(list(keys.values()))
        return [position for position, key in keys.items() if key in present]

    def save(self, snapshot: Snapshot, parent: tuple[bytes, int] | None) -> bool:
        """Queue a snapshot for writing; it stays pinned until that is done. False where the queue is full."""
        if not self._has_kv:
            parent = None
        arrays = {"ssm": _to_numpy(self._arena.ssm[snapshot.slot]), "conv": _to_numpy(self._arena.conv[snapshot.slot])}
        if self._has_kv:
            begin = parent[1] if parent else 0
            pages = torch.from_numpy(snapshot.pages)
            arrays["kv"] = _to_numpy(self._arena.gather_kv(pages, begin, snapshot.position))
        snapshot.pins += 1
        self._writing[snapshot.key] = snapshot
        queued = self._store.put(
            snapshot.key, snapshot.position, parent[0] if parent else None, self._fingerprint, arrays,
            lambda key, ok: self._done.append((key, ok)),
        )
        if not queued:
            self._written(snapshot.key, False)
        else:
            snapshot.stored = True
        return queued

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

    def load(self, key: bytes, pool: SnapshotPool, pages: PagePool) -> Snapshot | Stranded | None:
        """Bring a stored snapshot into the pool; None where the store cannot give it or there is no room."""
        links: list[StoredSnapshot] = []
        base: Snapshot | None = None
        cursor: bytes | None = key
        while cursor is not None:
            base = pool.peek(cursor)
            if base is not None:
                break
            link = self._store.get(cursor, self._fingerprint)
            if link is None or not self._fits(link):
                return Stranded() if links else None
            links.append(link)
            cursor = link.parent
        links.reverse()
        return self._assemble(key, base, links, pool, pages)

    def _written(self, key: bytes, ok: bool) -> None:
        snapshot = self._writing.pop(key)
        snapshot.pins -= 1
        snapshot.stored = snapshot.stored and ok

    def _fits(self, link: StoredSnapshot) -> bool:
        """Whether a stored snapshot has the shapes and dtypes of this model's arena."""
        expected = {"ssm": self._arena.ssm[0], "conv": self._arena.conv[0]}
        if self._has_kv:
            kv = link.arrays.get("kv")
            layers, two, _, _, heads, head_dim = self._arena.kv.shape
            expected["kv"] = self._arena.kv.new_empty(layers, two, kv.shape[2] if kv is not None else 0, heads, head_dim)
        return set(expected) == set(link.arrays) and all(
            _to_numpy(tensor).dtype == link.arrays[name].dtype and tuple(tensor.shape) == link.arrays[name].shape
            for name, tensor in expected.items()
        )

    def _assemble(
        self, key: bytes, base: Snapshot | None, links: list[StoredSnapshot], pool: SnapshotPool, pages: PagePool
    ) -> Snapshot | Stranded | None:
        """One pool entry from a chain: KV of every link after `base`, recurrent state of the last one."""
        begin = base.position if base else 0
        spans = _spans(begin, links) if self._has_kv else []
        if spans is None:
            return Stranded()
        if base is not None:
            base.pins += 1
        slot = pool.reserve(key)
        snapshot = None
        if slot is not None:
            table = self._chain_pages(base, links[-1].position, pages) if self._has_kv else NO_PAGES
            if table is None:
                pool.cancel(slot)
            else:
                for start, kv in spans:
                    self._arena.scatter_kv(torch.from_numpy(table), start, self._tensor(kv))
                self._arena.ssm[slot].copy_(self._tensor(links[-1].arrays["ssm"]))
                self._arena.conv[slot].copy_(self._tensor(links[-1].arrays["conv"]))
                snapshot = pool.insert(key, links[-1].position, slot, table)
                snapshot.stored = True
                pages.release(table)  # the pool holds its own references now
        if base is not None:
            base.pins -= 1
        return snapshot

    def _chain_pages(self, base: Snapshot | None, end: int, pages: PagePool) -> PageArray | None:
        """Pages for `end` tokens: those of `base` shared, its partial one copied, the rest new; None for want of room."""
        full = base.pages[: base.position // PAGE_TOKENS] if base else NO_PAGES
        missing = -(-end // PAGE_TOKENS) - len(full)
        if pages.num_free < missing:
            return None
        pages.share(full)
        added = np.array([pages.allocate() for _ in range(missing)], np.int64)
        if base is not None and len(full) < len(base.pages):
            self._arena.copy_page(int(base.pages[-1]), int(added[0]))
        return np.concatenate([full, added])

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """A stored array as a tensor of the arena's dtype (bfloat16 travels as its 16 bits)."""
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def _spans(begin: int, links: list[StoredSnapshot]) -> list[tuple[int, np.ndarray]] | None:
    """(first token, KV) of each link; None where the links do not join up."""
    spans = []
    for link in links:
        kv = link.arrays["kv"]
        if begin + kv.shape[2] != link.position:
            return None
        spans.append((begin, kv))
        begin = link.position
    return spans


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A view of a CPU tensor; bfloat16 as its 16 bits."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
