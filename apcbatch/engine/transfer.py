"""Export and import of snapshots between engines, as bytes.

The bytes have the format of a snapshot file of the store. They hold the KV of all tokens, so that no parent is needed.
Invariants: bytes other than the wanted snapshot's are refused before the pool changes. An import evicts no awaited
snapshot.
"""

from __future__ import annotations

from apcbatch.engine.page_tables import PageTables
from apcbatch.engine.pool import PagePool, SnapshotPool
from apcbatch.engine.snapshot_arrays import as_arrays, assemble, parts_of
from apcbatch.model.pipeline_arena import Arena
from apcbatch.store import Buffer
from apcbatch.store.format import make_header
from apcbatch.store.snapshot_file import decode, encode


class SnapshotTransfer:
    """Export and import of one engine's pooled snapshots. fingerprint: the model's fingerprint."""

    def __init__(
        self, arena: Arena, pool: SnapshotPool, pages: PagePool, page_tables: PageTables, fingerprint: bytes
    ) -> None:
        self._arena, self._pool, self._pages, self._page_tables = arena, pool, pages, page_tables
        self._fingerprint = fingerprint
        self._layout = arena.layout.stored()

    def export(self, key: bytes) -> list[Buffer] | None:
        """Return the bytes of a snapshot in the pool as buffers to concatenate; None if it is not there. They may be
        views of the pool: use them before the engine's next step."""
        snapshot = self._pool.peek(key)
        if snapshot is None:
            return None
        arrays = as_arrays(parts_of(self._arena, snapshot, 0))
        return encode(make_header(key, self._fingerprint, snapshot.position, None, arrays), arrays)[1]

    def adopt(self, key: bytes, position: int, data: Buffer, reads: int) -> bool:
        """Import a snapshot, and hold it until `reads` planned requests have resumed from it. Return False if it does
        not fit. Raises BadSnapshot if the bytes are not this snapshot's.
        """
        held = self._pool.peek(key)
        if held is not None:
            held.reads_left += reads
            return True
        link = decode(data, key, position, self._fingerprint, self._layout)
        if not self._page_tables.free(self._page_tables.needed(position), awaited=False):
            return False
        return assemble(self._arena, self._pool, self._pages, None, [link], awaited=False, reads=reads) is not None
