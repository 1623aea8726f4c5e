"""Write snapshots from their slots to the store, and load them back.

For models with attention a stored snapshot holds the KV of the tokens since its parent, so that a chain of parents
gives the whole KV; a chain with a gap is stranded. Slots on the host are written and read in place. Slots of a device
go through staging memory: the store's threads copy from the device what they write, and other threads prefetch what
will be loaded. The engine waits for neither; a pass waits for its own copies, on the device.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from apcbatch.display import counted
from apcbatch.engine.memory import queue_bytes
from apcbatch.engine.pool import NO_PAGES, PagePool, Snapshot, SnapshotPool
from apcbatch.engine.snapshot_arrays import Staging, as_arrays, assemble, parts_of
from apcbatch.engine.store_prefetch import Read, StorePrefetcher
from apcbatch.model.arena import Mark, Tensors
from apcbatch.model.pipeline_arena import Arena
from apcbatch.store import Store

WRITE_THREADS = 4  # threads of the store for a device; each has one pinned buffer
MOST_READ_THREADS = 8
STAGING_BYTES = 256 << 20  # bytes of pinned memory for prefetched snapshots
MOST_PREFETCHED = 64  # snapshots


def open_store(
    folder: Path, size_bytes: int, pool_bytes: int, slot_bytes: int, on_host: bool, warn: Callable[[str], None]
) -> Store:
    """Open the store of an engine. On the CPU one thread writes, with a device WRITE_THREADS. Raises UsageError."""
    store = Store.open(
        folder,
        size_limit_bytes=size_bytes,
        warn=warn,
        queue_bytes=queue_bytes(slot_bytes, pool_bytes, on_host),
        write_threads=1 if on_host else WRITE_THREADS,
    )
    count, num_bytes = store.held
    if 2 * size_bytes < num_bytes and not store.is_read_only:
        warn(
            f"the store {folder} holds {num_bytes:,} bytes in {counted(count, 'snapshot')}, and --store-size is "
            f"{size_bytes:,} bytes: at least {num_bytes - size_bytes:,} bytes of them are evicted when this run ends, "
            "if not before; raise --store-size to keep them"
        )
    return store


@dataclass(frozen=True)
class Stranded:
    """Stored snapshot whose chain of parents is incomplete: no position from `position` on is usable."""

    position: int


@dataclass(slots=True)
class _Write:
    """Snapshot whose write is under way. is_pinned: its slot has not been read yet."""

    snapshot: Snapshot
    is_pinned: bool = True

    def unpin(self) -> None:
        self.snapshot.pins -= self.is_pinned
        self.is_pinned = False


class Persistence:
    """Snapshots of one model in a store."""

    def __init__(self, store: Store, arena: Arena, fingerprint: bytes, model_name: str) -> None:
        self._store, self._arena, self._fingerprint = store, arena, fingerprint
        self._has_kv = arena.layout.has_tokens
        self._writing: dict[bytes, _Write] = {}
        self._copied: deque[_Write] = deque()  # appended to by the store's threads, like `_done`
        self._done: deque[tuple[bytes, bool]] = deque()
        store.register(fingerprint, model_name, arena.layout.stored())
        slots = STAGING_BYTES // max(1, arena.layout.slot_bytes)
        self._outgoing = Staging(arena.layout, WRITE_THREADS)
        self._incoming = Staging(arena.layout, min(max(2, slots), MOST_PREFETCHED))
        self._own = Staging(arena.layout, 1)  # the engine thread's buffer, for a snapshot that was not prefetched
        self._prefetcher: StorePrefetcher | None = None
        if not (arena.on_host or self._has_kv):
            threads = min(MOST_READ_THREADS, max(1, (os.cpu_count() or 1) // 2), self._incoming.num_buffers)
            self._prefetcher = StorePrefetcher(self._read, self._incoming, threads)

    @property
    def prefetches(self) -> bool:
        """Whether `prefetch` has an effect."""
        return self._prefetcher is not None

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Prefetch the snapshots of these keys, the soonest needed first, in place of the keys of earlier calls."""
        if self._prefetcher is not None:
            self._prefetcher.prefetch(keys)

    def positions(self, keys: dict[int, bytes]) -> list[int]:
        """Return the positions whose snapshot the store holds."""
        present = self._store.present(list(keys.values()))
        return [position for position, key in keys.items() if key in present]

    def save(self, snapshot: Snapshot, parent: tuple[bytes, int] | None, again: bool = False) -> bool:
        """Queue a snapshot for writing. It stays pinned until it is written, or until a device's slot is copied. Return
        False if the store refuses it. again: see Store.put."""
        write = self._writing.get(snapshot.key)
        if write is not None:
            if not write.is_pinned:  # it may have been evicted and computed again
                write.snapshot = snapshot
            snapshot.stored = True
            return True
        begin = parent[1] if parent else 0
        write = self._writing[snapshot.key] = _Write(snapshot)
        snapshot.pins += 1
        if self._arena.on_host:
            arrays: Any = as_arrays(parts_of(self._arena, snapshot, begin))
        else:
            arrays = partial(self._fetched, write, snapshot, begin, self._arena.mark())
        snapshot.stored = self._store.put(
            snapshot.key,
            snapshot.position,
            parent,
            self._fingerprint,
            arrays,
            lambda key, is_stored: self._done.append((key, is_stored)),
            again,
        )
        snapshot.refused = not snapshot.stored
        if not snapshot.stored:
            self._written(snapshot.key, False)
        return snapshot.stored

    def touch(self, snapshot: Snapshot) -> None:
        """Mark a snapshot as consumed, for the store's eviction."""
        if snapshot.stored:
            self._store.touch(snapshot.key)

    def drain(self) -> None:
        """Unpin the snapshots that were copied or written since the last call."""
        while self._copied:
            self._copied.popleft().unpin()
        while self._done:
            self._written(*self._done.popleft())

    def wait(self) -> bool:
        """Wait for all writes. Return False if none was under way."""
        if not self._writing:
            return False
        self._store.flush()
        self.drain()
        return True

    def load(self, key: bytes, pool: SnapshotPool, pages: PagePool, awaited: bool) -> Snapshot | Stranded | None:
        """Load a stored snapshot into the pool. Return None if the store cannot give it or the pool is full.

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

    def close(self) -> None:
        """Stop prefetching. The store stays open."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _load_state(self, key: bytes, pool: SnapshotPool, awaited: bool) -> Snapshot | None:
        """Load a snapshot without KV; its slot is published once every byte is verified."""
        slot = pool.reserve(key, awaited)
        if slot is None:
            return None
        position = (
            self._read(key, self._arena.host_slot(slot)) if self._arena.on_host else self._read_to_device(key, slot)
        )
        if position is None:
            pool.cancel(key, slot)
            return None
        snapshot = pool.insert(key, position, slot, NO_PAGES, awaited=awaited)
        if snapshot is not None:
            snapshot.stored = True
        return snapshot

    def _read(self, key: bytes, into: Tensors) -> int | None:
        """Read a verified snapshot. Return its position, None if the store cannot give it."""
        stored = self._store.get(key, self._fingerprint, into=as_arrays(into))
        return None if stored is None else stored.position

    def _read_to_device(self, key: bytes, slot: int) -> int | None:
        """Begin to copy a snapshot, prefetched or read now, to a device's slot. Return its position."""
        read, staging = None if self._prefetcher is None else self._prefetcher.take(key), self._incoming
        if read is None:
            staging, buffer = self._own, self._own.take()
            read = Read(self._read(key, buffer), buffer)
        copied = self._arena.copy_in(slot, read.buffer) if read.position is not None else None
        staging.give_back(read.buffer, copied)
        return read.position

    @contextmanager
    def _fetched(
        self, write: _Write, snapshot: Snapshot, begin: int, after: Mark
    ) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
        """Yield the arrays of a snapshot in a device's slot, with the KV of the tokens from `begin` on. Runs in a
        thread of the store; the slot is unpinned once they are copied."""
        buffer = self._outgoing.take()
        try:
            parts = dict(buffer)
            try:
                self._arena.copy_out(snapshot.slot, buffer, after)
                if self._has_kv:
                    parts |= self._arena.gather(torch.from_numpy(snapshot.pages), begin, snapshot.position, after)
            except RuntimeError as error:  # the device's
                raise OSError(f"a snapshot could not be copied from the device: {error}") from error
            finally:
                self._copied.append(write)
            yield as_arrays(parts)
        finally:
            self._outgoing.give_back(buffer)

    def _written(self, key: bytes, is_stored: bool) -> None:
        write = self._writing.pop(key)
        write.unpin()
        write.snapshot.stored = is_stored
