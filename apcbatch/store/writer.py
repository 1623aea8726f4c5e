"""Writer: the store's background disk writer: a bounded queue, one thread, and two transactions per batch.

`offer` refuses a snapshot if the queue is full, or with `again` waits for room. The thread collects work for a moment,
then stores a batch in three steps:
1. A transaction chooses the snapshots to store, evicts others for them and reserves their bytes.
2. The files are written under temporary names, without any lock.
3. A transaction renames the files and enters them in the index.

So a batch of any size costs two transactions, and a snapshot is visible only when it is complete. After a kill,
the process that cleans up finds in the index what step 1 reserved.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from apcbatch.store.database import IndexDamaged, IndexFault, row_id
from apcbatch.store.eviction import Capacity
from apcbatch.store.format import Array, BadSnapshot, Header
from apcbatch.store.index import Index
from apcbatch.store.session import Session
from apcbatch.store.snapshot_file import SnapshotFolder, check_link, token_names
from apcbatch.store.status import Status

LINGER_S = 0.03
MAX_BATCH_OFFERS = 64
MAX_BATCH_BYTES = 32 << 20

OnDone = Callable[[bytes, bool], None]
Fetch = Callable[[], AbstractContextManager[Mapping[str, Array]]]
Outcome = Literal["written", "duplicates", "skipped_no_room", "skipped_stranded", "failed"]


@dataclass(slots=True, eq=False)
class Offer:
    """A snapshot to be stored.

    fetch: returns a context manager of its arrays, entered while the file is written. num_bytes: size of its tensors;
    once capacity is taken, size of its file. outcome: name of the counter it adds to.
    """

    header: Header
    fetch: Fetch
    num_bytes: int
    on_done: OnDone | None
    outcome: Outcome = "failed"
    temporary_path: str = ""

    @property
    def key(self) -> bytes:
        return self.header.key


@dataclass(frozen=True, slots=True)
class Touch:
    """One use of a snapshot."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Suspect:
    """A snapshot that could not be used when it was read."""

    key: bytes
    fingerprint: bytes


@dataclass(slots=True)
class Batch:
    """Work of one batch.

    touches: key -> number of uses. suspects: key -> fingerprint. protected: keys that must not be evicted, because a
    queued snapshot is their child. count, num_bytes: number of queue entries it took, and bytes of its offers.
    """

    offers: list[Offer] = field(default_factory=list)
    touches: dict[bytes, int] = field(default_factory=dict)
    suspects: dict[bytes, bytes] = field(default_factory=dict)
    protected: set[bytes] = field(default_factory=set)
    count: int = 0
    num_bytes: int = 0


class Writer:
    """Stores offers, touches and suspects in the order they come. names: names of models, by fingerprint.

    No fault of the disk or the index raises an error.
    """

    def __init__(
        self,
        index: Index,
        folder: SnapshotFolder,
        session: Session,
        status: Status,
        on_settled: Callable[[bytes], None],
        *,
        limit_bytes: int,
        queue_bytes: int,
        queue_offers: int,
        threads: int,
    ) -> None:
        """on_settled: called with the key of each suspect that was checked again. limit_bytes: size limit of the store.
        threads: number of files written at a time.

        A batch is limited to about an eighth of limit_bytes, because its snapshots cannot be evicted for each other.
        """
        self.names: dict[bytes, str] = {}
        self._index, self._folder, self._session, self._status = index, folder, session, status
        self._on_settled, self._limit_bytes = on_settled, limit_bytes
        self._is_index_damaged = False
        self._threads = ThreadPoolExecutor(threads, "apcbatch-store") if threads > 1 else None
        self._batch_bytes = min(MAX_BATCH_BYTES * threads, limit_bytes // 8)
        self._queue_bytes, self._queue_offers = queue_bytes, queue_offers
        self._queue: deque[Offer | Touch | Suspect] = deque()
        self._queued_keys: set[bytes] = set()
        self._refused_keys: set[bytes] = set()  # by the full queue; skipped, unless they are queued later
        self._num_bytes = self._num_put = self._num_done = self._num_flushing = 0
        self._is_closing = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="apcbatch-store", daemon=True)
        self._thread.start()

    def offer(self, offer: Offer, again: bool) -> bool:
        """Queue a snapshot. Return False if the queue is full or closed, or already contains the snapshot. again: see
        Store.put."""
        with self._change:
            if again:
                self._change.wait_for(lambda: self._is_closing or self._has_room(offer))
            if self._is_closing:
                return False
            if offer.key in self._queued_keys:
                self._status.count(duplicates=1)
                return False
            if not self._has_room(offer):
                self._status.count(skipped_full_queue=1)
                self._refused_keys.add(offer.key)
                return False
            if again and offer.key in self._refused_keys:
                self._refused_keys.remove(offer.key)
                self._status.count(skipped_full_queue=-1)
            self._queued_keys.add(offer.key)
            self._num_bytes += offer.num_bytes
            self.append(offer)
        return True

    def _has_room(self, offer: Offer) -> bool:
        """Return whether the queue has room for an offer. An empty queue has room for an offer of any size."""
        is_short = len(self._queued_keys) < self._queue_offers
        return not self._queued_keys or (is_short and self._num_bytes + offer.num_bytes <= self._queue_bytes)

    def append(self, work: Offer | Touch | Suspect) -> None:
        """Queue work regardless of the queue's length."""
        with self._change:
            if not self._is_closing:
                self._queue.append(work)
                self._num_put += 1
                self._change.notify_all()

    def flush(self) -> None:
        """Wait until everything queued before this call is done and visible, or has failed."""
        with self._change:
            target = self._num_put
            self._num_flushing += 1
            self._change.notify_all()
            self._change.wait_for(lambda: self._num_done >= target)
            self._num_flushing -= 1

    def close(self, drain: bool) -> None:
        """Stop the thread. drain: first store the queue; False drops everything after the current batch."""
        with self._change:
            self._is_closing = True
            dropped = [] if drain else self._drop_queue()
            self._change.notify_all()
        try:
            _report(dropped)
        finally:
            self._thread.join()

    def _drop_queue(self) -> list[Offer]:
        """Empty the queue, and return the offers dropped."""
        dropped = [work for work in self._queue if isinstance(work, Offer)]
        self._num_done += len(self._queue)
        self._num_bytes -= sum(offer.num_bytes for offer in dropped)
        self._queue.clear()
        self._queued_keys.difference_update(offer.key for offer in dropped)
        self._change.notify_all()
        return dropped

    def _run(self) -> None:
        """Store batches until the queue is closed and empty."""
        try:
            while (batch := self._take()) is not None:
                self._store(batch)
                _report(batch.offers)
                with self._change:
                    self._queued_keys.difference_update(offer.key for offer in batch.offers)
                    self._num_bytes -= batch.num_bytes
                    self._num_done += batch.count
                    self._change.notify_all()
        finally:  # even after an unexpected error: no caller may wait for a thread that has ended
            if self._threads is not None:
                self._threads.shutdown()
            with self._change:
                self._is_closing = True
                dropped = self._drop_queue()
                self._num_done = self._num_put
            _report(dropped)

    def _take(self) -> Batch | None:
        """Wait for the next batch, and take it from the queue. Return None when the queue is empty and closed."""
        with self._change:
            self._change.wait_for(lambda: self._queue or self._is_closing)
            end = time.monotonic() + LINGER_S
            while not self._is_batch_due() and (left := end - time.monotonic()) > 0:
                self._change.wait(left)
            if not self._queue:
                return None
            batch = Batch()
            while (
                self._queue
                and len(batch.offers) < MAX_BATCH_OFFERS
                and (not batch.offers or batch.num_bytes < self._batch_bytes)
            ):
                work = self._queue.popleft()
                batch.count += 1
                if isinstance(work, Offer):
                    batch.offers.append(work)
                    batch.num_bytes += work.num_bytes
                elif isinstance(work, Touch):
                    batch.touches[work.key] = batch.touches.get(work.key, 0) + 1
                else:
                    batch.suspects[work.key] = work.fingerprint
            batch.protected = {
                work.header.parent
                for work in (*batch.offers, *self._queue)
                if isinstance(work, Offer) and work.header.parent
            }
        return batch

    def _is_batch_due(self) -> bool:
        """Return whether to store a batch now instead of waiting for more work."""
        return (
            self._is_closing
            or self._num_flushing > 0
            or len(self._queued_keys) >= min(MAX_BATCH_OFFERS, self._queue_offers)
            or self._num_bytes >= min(self._batch_bytes, self._queue_bytes // 2)
        )

    def _store(self, batch: Batch) -> None:
        """Store a batch. Afterwards each offer has its outcome."""
        try:
            if not self._is_index_damaged:
                written = self._write_all(self._admit(batch))
                if written:
                    self._publish(written, batch.touches)
        except (OSError, IndexFault) as error:
            self._is_index_damaged = isinstance(error, IndexDamaged)
            self._status.failure(error, "keeping snapshots")
        for offer in batch.offers:
            self._status.count(**{offer.outcome: 1})
            if offer.outcome == "written":
                self._status.count(bytes_written=offer.num_bytes)

    def _admit(self, batch: Batch) -> list[Offer]:
        """Run the first transaction: check the suspects, count the uses, choose what to store, and reserve its bytes.

        Returns the admitted offers.
        """
        now = time.time()
        admitted: list[Offer] = []
        with self._index.transaction():
            self._index.release(self._session.name)
            settled = [key for key, fingerprint in batch.suspects.items() if self._settle(key, fingerprint)]
            for key, uses in batch.touches.items():
                self._index.touch(key, uses, now)
            known = self._known(batch.offers)
            capacity = Capacity(self._index, self._folder, self._limit_bytes, batch.protected.union(known.values()))
            for offer in batch.offers:
                if self._is_wanted(offer, known) and self._make_room(offer, capacity):
                    known[row_id(offer.key)] = offer.key
                    admitted.append(offer)
            self._index.reserve(self._session.name, [(offer.key, offer.num_bytes) for offer in admitted])
        self._status.count(evicted=capacity.num_evicted)
        for key in settled:
            self._on_settled(key)
        return admitted

    def _known(self, offers: list[Offer]) -> dict[int, bytes]:
        """Return row id -> key of the rows that have the id of an offer or of its parent. The key may be another one
        with the same id."""
        keys = {offer.key for offer in offers} | {offer.header.parent for offer in offers}
        return {row_id(key): key for key in self._index.sharing([key for key in keys if key is not None])}

    def _settle(self, key: bytes, fingerprint: bytes) -> bool:
        """Check a suspect again, and remove it if it is bad or missing. Return False if it cannot be checked."""
        try:
            snapshot = self._folder.read(key, fingerprint)
            parent = snapshot.parent if token_names(snapshot) else None
            if parent is not None and self._folder.exists(parent):
                check_link(snapshot, self._folder.header(parent))
        except FileNotFoundError:
            self._index.delete(key)
        except BadSnapshot:
            self._index.delete(key)
            self._folder.remove(key)
        except OSError:
            return False
        return True

    def _is_wanted(self, offer: Offer, known: Mapping[int, bytes]) -> bool:
        """Return whether to store a snapshot; if not, set its outcome.

        It is not stored if its key or another key with the same row id is in the index, or if it needs its parent
        (is_chained) and the parent is not in the index.
        """
        found, parent = known.get(row_id(offer.key)), offer.header.parent
        if found is not None:
            offer.outcome = "duplicates" if found == offer.key else "failed"
            return False
        if parent is not None and offer.header.is_chained and known.get(row_id(parent)) != parent:
            offer.outcome = "skipped_stranded"
            return False
        return True

    def _make_room(self, offer: Offer, capacity: Capacity) -> bool:
        """Take capacity for an offer, evicting snapshots if needed. Return False, with a warning, if it does not
        fit."""
        offer.num_bytes = len(offer.header.encode()) + offer.header.num_data_bytes
        if capacity.take(offer.num_bytes):
            return True
        offer.outcome = "skipped_no_room"
        self._status.once(
            "no room",
            f"a snapshot of {offer.num_bytes:,} bytes finds no room below the size limit of "
            f"{self._limit_bytes:,} bytes; some snapshots are not kept (raise --store-size)",
        )
        return False

    def _write_all(self, offers: list[Offer]) -> list[Offer]:
        """Write the offers' temporary files. Return the offers whose file was written, in order."""
        for offer in offers:
            offer.temporary_path = self._session.temporary_path()
        run = map if self._threads is None else self._threads.map
        return [offer for offer, is_written in zip(offers, run(self._write, offers), strict=True) if is_written]

    def _write(self, offer: Offer) -> bool:
        """Write a temporary file. This is the only step that reads the tensors. Return False if it fails."""
        try:
            with offer.fetch() as arrays:
                offer.header = self._folder.write(offer.temporary_path, offer.header, arrays)
            return True
        except OSError as error:
            self._status.failure(error, "writing a snapshot")
            return False

    def _publish(self, offers: list[Offer], touches: Mapping[bytes, int]) -> None:
        """Run the second transaction: rename the files and enter them in the index.

        A snapshot that did not become visible leaves no file.
        """
        is_committed, now = False, time.time()
        try:
            with self._index.transaction():
                self._index.release(self._session.name)
                known = self._known(offers)
                fingerprints = dict.fromkeys(offer.header.fingerprint for offer in offers)
                models = {one: self._index.model_id(one, self.names.get(one)) for one in fingerprints}
                for offer in offers:
                    if self._is_wanted(offer, known) and self._rename(offer):
                        self._index.insert(offer.header, offer.num_bytes, models[offer.header.fingerprint], now)
                        known[row_id(offer.key)] = offer.key
                for offer in offers:
                    if offer.key in touches and offer.outcome == "written":
                        self._index.touch(offer.key, touches[offer.key], now)
            is_committed = True
        finally:
            for offer in offers:
                if offer.outcome != "written":
                    self._folder.discard(offer.temporary_path)
                elif not is_committed:
                    offer.outcome = "failed"
                    self._folder.discard(self._folder.path(offer.key))

    def _rename(self, offer: Offer) -> bool:
        """Give the file its final name. The offer then counts as written, unless the transaction fails."""
        try:
            self._folder.publish(offer.temporary_path, offer.key)
            offer.outcome = "written"
            return True
        except OSError as error:
            self._status.failure(error, "naming a snapshot")
            return False


def _report(offers: Iterable[Offer]) -> None:
    """Report every offer, even after a callback has raised; then raise the first callback's error."""
    errors: list[BaseException] = []
    for offer in offers:
        try:
            if offer.on_done is not None:
                offer.on_done(offer.key, offer.outcome in ("written", "duplicates"))
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]
