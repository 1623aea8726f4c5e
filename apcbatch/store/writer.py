"""Writer: the thread behind which snapshots are written, and its bounded queue.

Must not know: files, SQL. Whoever offers never waits: a full queue refuses. Work is gathered for a moment,
because a batch costs the index the same two transactions however large it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from apcbatch.store.publisher import Batch, Offer, Publisher

LINGER_S = 0.03
MAX_BATCH_OFFERS = 64
MAX_BATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Touch:
    """A snapshot was consumed."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Suspect:
    """A snapshot could not be used."""

    key: bytes
    fingerprint: bytes


class Writer:
    """Takes offers, touches and suspects in the order they come, and gives them to the publisher in
    batches."""

    def __init__(
        self, publisher: Publisher, queue_bytes: int, queue_offers: int, size_limit_bytes: int, write_threads: int = 1
    ) -> None:
        """size_limit_bytes: of the store; a batch is small beside it, because nothing of a batch can be
        evicted to make room for the rest of it. write_threads: the publisher's, each with a part of a batch."""
        self._publisher = publisher
        self._batch_bytes = min(MAX_BATCH_BYTES * write_threads, size_limit_bytes // 8)
        self._queue_bytes = queue_bytes
        self._queue_offers = queue_offers
        self._queue: deque[Offer | Touch | Suspect] = deque()
        self._queued_keys: set[bytes] = set()
        self._num_bytes = 0
        self._num_put = 0
        self._num_done = 0
        self._num_waiting = 0
        self._is_closing = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="apcbatch-store", daemon=True)
        self._thread.start()

    def offer(self, offer: Offer) -> str:
        """Queue a snapshot. Returns `queued`, `duplicate` (it is on its way already), `full` or `closed`."""
        with self._change:
            if self._is_closing:
                return "closed"
            if offer.key in self._queued_keys:
                return "duplicate"
            is_too_long = len(self._queued_keys) >= self._queue_offers
            is_too_large = self._num_bytes + offer.num_bytes > self._queue_bytes
            if self._queued_keys and (is_too_long or is_too_large):
                return "full"
            self._queued_keys.add(offer.key)
            self._num_bytes += offer.num_bytes
            self._append(offer)
        return "queued"

    def touch(self, key: bytes) -> None:
        """Note that a snapshot was consumed."""
        self._append(Touch(key))

    def suspect(self, key: bytes, fingerprint: bytes) -> None:
        """Have a snapshot looked at that could not be used when it was read."""
        self._append(Suspect(key, fingerprint))

    def _append(self, work: Offer | Touch | Suspect) -> None:
        with self._change:
            if not self._is_closing:
                self._queue.append(work)
                self._num_put += 1
                self._change.notify_all()

    def flush(self) -> None:
        """Return when everything queued before this call is done and visible, or has failed."""
        with self._change:
            target = self._num_put
            self._num_waiting += 1
            self._change.notify_all()
            self._change.wait_for(lambda: self._num_done >= target)
            self._num_waiting -= 1

    def close(self, drain: bool) -> None:
        """Stop the thread; first finish what is queued (drain), or give it up (only the batch at hand is
        finished)."""
        with self._change:
            self._is_closing = True
            dropped = [] if drain else self._drop_queue()
            self._change.notify_all()
        _tell(dropped)
        self._thread.join()

    def _drop_queue(self) -> list[Offer]:
        dropped = [work for work in self._queue if isinstance(work, Offer)]
        self._num_done += len(self._queue)
        self._num_bytes -= sum(offer.num_bytes for offer in dropped)
        self._queue.clear()
        self._queued_keys.difference_update(offer.key for offer in dropped)
        self._change.notify_all()
        return dropped

    def _run(self) -> None:
        try:
            while (taken := self._take()) is not None:
                batch, count, num_bytes = taken
                self._publisher.process(batch)
                _tell(batch.offers)
                with self._change:
                    self._queued_keys.difference_update(offer.key for offer in batch.offers)
                    self._num_bytes -= num_bytes
                    self._num_done += count
                    self._change.notify_all()
        finally:  # also after a fault in our own code: nobody may wait for a thread that is gone
            self._publisher.close()
            with self._change:
                self._is_closing = True
                dropped = self._drop_queue()
                self._num_done = self._num_put
            _tell(dropped)

    def _take(self) -> tuple[Batch, int, int] | None:
        """The next batch, its pieces of work and its bytes; None when all is done and the store closes."""
        with self._change:
            self._change.wait_for(lambda: self._queue or self._is_closing)
            end = time.monotonic() + LINGER_S
            while not self._is_enough() and (left := end - time.monotonic()) > 0:
                self._change.wait(left)
            if not self._queue:
                return None
            batch, count, num_bytes = Batch(), 0, 0
            while (
                self._queue
                and len(batch.offers) < MAX_BATCH_OFFERS
                and (not batch.offers or num_bytes < self._batch_bytes)
            ):
                work = self._queue.popleft()
                count += 1
                if isinstance(work, Offer):
                    batch.offers.append(work)
                    num_bytes += work.num_bytes
                elif isinstance(work, Touch):
                    batch.touches[work.key] = batch.touches.get(work.key, 0) + 1
                else:
                    batch.suspects[work.key] = work.fingerprint
            batch.protected = {
                work.header.parent
                for work in (*batch.offers, *self._queue)
                if isinstance(work, Offer) and work.header.parent
            }
        return batch, count, num_bytes

    def _is_enough(self) -> bool:
        return (
            self._is_closing
            or self._num_waiting > 0
            or len(self._queued_keys) >= min(MAX_BATCH_OFFERS, self._queue_offers)
            or self._num_bytes >= min(self._batch_bytes, self._queue_bytes // 2)
        )


def _tell(offers: list[Offer]) -> None:
    for offer in offers:
        if offer.on_done is not None:
            offer.on_done(offer.key, offer.is_stored)
