"""Publisher: takes a batch of work through the three steps that put snapshots into a store.

Must not know: queues, who waits. One transaction decides what is stored and makes room for it; then the files
are written under temporary names, without any lock; a second transaction names them and enters them in the
index. So a batch costs two transactions however many snapshots it has, nothing is visible before it is whole,
and what a killed process had announced in the first transaction is known to the one that cleans up after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from apcbatch.layout import Layout
from apcbatch.store.counters import Tally
from apcbatch.store.database import IndexDamaged, IndexFault
from apcbatch.store.entry import row_id
from apcbatch.store.eviction import Room
from apcbatch.store.header import Array, BadSnapshot, Header
from apcbatch.store.index import Index
from apcbatch.store.notices import Notices
from apcbatch.store.objects import Objects, check_link, token_names
from apcbatch.store.session import Session
from apcbatch.store.snapshot_file import encode

OnDone = Callable[[bytes, bool], None]
Fetch = Callable[[], AbstractContextManager[Mapping[str, Array]]]
Outcome = Literal["written", "duplicates", "skipped_no_room", "skipped_stranded", "failed"]


@dataclass(slots=True, eq=False)
class Offer:
    """A snapshot to be stored, and what became of it; num_bytes is the size of its tensors, then of its
    file. fetch: gives its arrays for as long as its file is written."""

    header: Header
    fetch: Fetch
    num_bytes: int
    on_done: OnDone | None
    outcome: Outcome = "failed"
    temporary_path: str = ""

    @property
    def key(self) -> bytes:
        return self.header.key

    @property
    def is_stored(self) -> bool:
        return self.outcome in ("written", "duplicates")


@dataclass(slots=True)
class Batch:
    """Work in the order it came. touches: key -> uses; suspects: key -> fingerprint of snapshots that could
    not be used when they were read; protected: keys that must not be evicted, because a snapshot that is on
    its way needs them."""

    offers: list[Offer] = field(default_factory=list)
    touches: dict[bytes, int] = field(default_factory=dict)
    suspects: dict[bytes, bytes] = field(default_factory=dict)
    protected: set[bytes] = field(default_factory=set)


class Publisher:
    """Stores batches; nothing is raised for a fault of the disk or of the index."""

    def __init__(
        self,
        index: Index,
        objects: Objects,
        session: Session,
        limit_bytes: int,
        names: Mapping[bytes, str],
        layouts: Mapping[bytes, Layout],
        tally: Tally,
        notices: Notices,
        on_settled: Callable[[bytes], None],
        write_threads: int = 1,
    ) -> None:
        """names, layouts: what is known of a model, by its fingerprint. on_settled: told each suspect whose
        doubt is resolved. write_threads: how many files are written at a time."""
        self._index = index
        self._objects = objects
        self._session = session
        self._limit_bytes = limit_bytes
        self._names = names
        self._layouts = layouts
        self._tally = tally
        self._notices = notices
        self._on_settled = on_settled
        self._is_index_damaged = False
        self._threads = ThreadPoolExecutor(write_threads, "apcbatch-store") if write_threads > 1 else None

    def close(self) -> None:
        """Let go of the threads; nothing is processed after it."""
        if self._threads is not None:
            self._threads.shutdown()

    def process(self, batch: Batch) -> None:
        """Do the batch's work; afterwards each offer's outcome says what became of it."""
        try:
            if not self._is_index_damaged:
                written = self._write_all(self._admit(batch))
                if written:
                    self._publish(written, batch.touches)
        except (OSError, IndexFault) as error:
            self._is_index_damaged = isinstance(error, IndexDamaged)
            self._notices.failure(error, "keeping snapshots")
        for offer in batch.offers:
            self._tally.add(**{offer.outcome: 1})
            if offer.outcome == "written":
                self._tally.add(bytes_written=offer.num_bytes)

    def _admit(self, batch: Batch) -> list[Offer]:
        """First transaction: settle the suspects, note the uses, choose what is stored and reserve its
        bytes."""
        now = time.time()
        admitted: list[Offer] = []
        with self._index.transaction():
            self._index.release(self._session.name)
            settled = [key for key, owner in batch.suspects.items() if self._settle(key, owner)]
            for key, uses in batch.touches.items():
                self._index.touch(key, uses, now)
            known = self._known(batch.offers)
            protected = batch.protected.union(known.values())
            room = Room(self._index, self._objects, self._limit_bytes, protected)
            for offer in batch.offers:
                if self._is_wanted(offer, known) and self._make_room(offer, room):
                    known[row_id(offer.key)] = offer.key
                    admitted.append(offer)
            self._index.reserve(self._session.name, [(offer.key, offer.num_bytes) for offer in admitted])
        self._tally.add(evicted=room.num_evicted)
        for key in settled:
            self._on_settled(key)
        return admitted

    def _known(self, offers: list[Offer]) -> dict[int, bytes]:
        """The keys of rows that matter to the offers: their own, their parents', and those that share an id
        with one."""
        keys = {offer.key for offer in offers} | {offer.header.parent for offer in offers}
        return {row_id(key): key for key in self._index.sharing([key for key in keys if key is not None])}

    def _settle(self, key: bytes, fingerprint: bytes) -> bool:
        """Remove a suspect if it is still bad or missing; False where that cannot be told."""
        try:
            snapshot = self._objects.read(key, fingerprint, self._layouts)
            parent = snapshot.parent if token_names(snapshot) else None
            if parent is not None and self._objects.exists(parent):
                check_link(snapshot, self._objects.header(parent))
        except FileNotFoundError:
            self._index.delete(key)
        except BadSnapshot:
            self._index.delete(key)
            self._objects.remove(key)
        except OSError:
            return False
        return True

    def _is_wanted(self, offer: Offer, known: Mapping[int, bytes]) -> bool:
        """False for a snapshot that is there already, and for one whose parent is not."""
        found, parent = known.get(row_id(offer.key)), offer.header.parent
        if found is not None:
            offer.outcome = "duplicates" if found == offer.key else "failed"
            return False
        if parent is not None and offer.header.is_chained and known.get(row_id(parent)) != parent:
            offer.outcome = "skipped_stranded"
            return False
        return True

    def _make_room(self, offer: Offer, room: Room) -> bool:
        offer.num_bytes = len(offer.header.encode()) + offer.header.num_data_bytes
        if room.make(offer.num_bytes):
            return True
        offer.outcome = "skipped_no_room"
        self._notices.once(
            "no room",
            f"a snapshot of {offer.num_bytes:,} bytes finds no room below the size limit of "
            f"{self._limit_bytes:,} bytes; some snapshots are not kept (raise --store-size)",
        )
        return False

    def _write_all(self, offers: list[Offer]) -> list[Offer]:
        """Write the offers' files; those that are there, in order."""
        for offer in offers:
            offer.temporary_path = self._session.temporary_path()
        run = map if self._threads is None else self._threads.map
        return [offer for offer, is_there in zip(offers, run(self._write, offers), strict=True) if is_there]

    def _write(self, offer: Offer) -> bool:
        """Write the file under a temporary name; this is the only step that reads the tensors."""
        try:
            with offer.fetch() as arrays:
                offer.header, chunks = encode(offer.header, arrays)
                self._objects.write(offer.temporary_path, chunks)
            return True
        except OSError as error:
            self._notices.failure(error, "writing a snapshot")
            return False

    def _publish(self, offers: list[Offer], touches: Mapping[bytes, int]) -> None:
        """Second transaction: name the files and enter them. What did not become visible leaves no file."""
        is_committed, now = False, time.time()
        try:
            with self._index.transaction():
                self._index.release(self._session.name)
                known = self._known(offers)
                models = {offer.header.fingerprint: 0 for offer in offers}
                for fingerprint in models:
                    models[fingerprint] = self._index.model_id(fingerprint, self._names.get(fingerprint))
                for offer in offers:
                    if self._is_wanted(offer, known) and self._name(offer):
                        self._index.insert(offer.header, offer.num_bytes, models[offer.header.fingerprint], now)
                        known[row_id(offer.key)] = offer.key
                for offer in offers:
                    if offer.key in touches and offer.outcome == "written":
                        self._index.touch(offer.key, touches[offer.key], now)
            is_committed = True
        finally:
            for offer in offers:
                if offer.outcome != "written":
                    self._objects.discard(offer.temporary_path)
                elif not is_committed:
                    offer.outcome = "failed"
                    self._objects.discard(self._objects.path(offer.key))

    def _name(self, offer: Offer) -> bool:
        """Give the file its final name; from then on the offer counts as written unless that is taken
        back."""
        try:
            self._objects.publish(offer.temporary_path, offer.key)
            offer.outcome = "written"
            return True
        except OSError as error:
            self._notices.failure(error, "naming a snapshot")
            return False
