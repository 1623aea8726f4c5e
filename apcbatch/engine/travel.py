"""Snapshots that travel between engines: the bytes of one, and one made from bytes.

Must not know: where the bytes go or come from, sequences. A snapshot travels as the store's own file, with the KV of
all its tokens, so that it needs no parent. Invariants: bytes that are not exactly the snapshot that is asked for are
refused before anything of the pool is touched; what arrives takes neither a snapshot that a plan waits for, nor pages
that running sequences are owed.
"""

from __future__ import annotations

from apcbatch.engine.assembly import as_arrays, assemble, parts_of
from apcbatch.engine.page_tables import PageTables
from apcbatch.engine.pages import PagePool
from apcbatch.engine.pool import SnapshotPool
from apcbatch.model.spread_arena import Arena
from apcbatch.store import Buffer
from apcbatch.store.header import make_header
from apcbatch.store.snapshot_file import decode, encode


class Travel:
    """Sends and takes in the snapshots of one engine's pool. fingerprint: the model's."""

    def __init__(
        self, arena: Arena, pool: SnapshotPool, pages: PagePool, page_tables: PageTables, fingerprint: bytes
    ) -> None:
        self._arena, self._pool, self._pages, self._page_tables = arena, pool, pages, page_tables
        self._fingerprint = fingerprint
        self._layout = arena.layout.stored()

    def export(self, key: bytes) -> list[Buffer] | None:
        """The bytes of a held snapshot, as buffers to be put one after the other; None if it is not held. They may
        point into the pool: use them before the engine's next step."""
        snapshot = self._pool.peek(key)
        if snapshot is None:
            return None
        arrays = as_arrays(parts_of(self._arena, snapshot, 0))
        return encode(make_header(key, self._fingerprint, snapshot.position, None, arrays), arrays)[1]

    def adopt(self, key: bytes, position: int, data: Buffer, reads: int, owed_pages: int) -> bool:
        """Take a snapshot into the pool until so many requests of a plan have resumed from it; False for no room.

        owed_pages: what running sequences may still ask for. Raises BadSnapshot for other bytes than its own.
        """
        held = self._pool.peek(key)
        if held is not None:
            held.reads_left += reads
            return True
        link = decode(data, key, position, self._fingerprint, self._layout)
        if not self._page_tables.free(self._page_tables.needed(position) + owed_pages, awaited=False):
            return False
        return assemble(self._arena, self._pool, self._pages, None, [link], awaited=False, reads=reads) is not None
