"""Prefetch stored snapshots: threads read and verify them before the sequences that resume from them are admitted.

Invariants: `take` returns verified bytes. Keys are read in order, as far as buffers are free. The buffer of a key that
is no longer wanted is freed. `take` returns None for a key that no thread has begun, so that it never waits for another
key's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition, Thread

from apcbatch.engine.snapshot_arrays import Staging
from apcbatch.model.arena import Tensors


@dataclass(frozen=True, slots=True)
class Read:
    """Result of a read. position: tokens of the snapshot, None if the store does not have it. buffer: staging memory
    with its state, which the caller must free in both cases."""

    position: int | None
    buffer: Tensors


class StorePrefetcher:
    """Prefetcher into the buffers of `staging`, with `num_threads` threads. read: fills a buffer with the verified
    snapshot of a key; returns its position, or None."""

    def __init__(self, read: Callable[[bytes, Tensors], int | None], staging: Staging, num_threads: int) -> None:
        self._read, self._staging = read, staging
        self._queued: dict[bytes, None] = {}  # keys not begun, the soonest needed first
        self._begun: dict[bytes, Future[Read]] = {}
        self._is_closed = False
        self._changed = Condition()
        self._threads = [Thread(target=self._run, name="apcbatch-read-ahead", daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def prefetch(self, keys: Collection[bytes]) -> None:
        """Set the keys to read, the soonest needed first, in place of earlier ones."""
        wanted = dict.fromkeys(keys)
        with self._changed:
            unwanted = [self._begun.pop(key) for key in list(self._begun) if key not in wanted]
            self._queued = {key: None for key in wanted if key not in self._begun}
            self._changed.notify_all()
        for future in unwanted:
            future.add_done_callback(self._discard)

    def take(self, key: bytes) -> Read | None:
        """Return and forget the read of a key. Wait for a thread that is reading it; None if none has begun. Raises
        `read`'s own exception."""
        with self._changed:
            self._queued.pop(key, None)
            future = self._begun.pop(key, None)
        return None if future is None else future.result()

    def close(self) -> None:
        """Free the buffers that were not taken, and join the threads."""
        with self._changed:
            self._is_closed = True
        self.prefetch([])
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        self._staging.prepare()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queued or self._is_closed)
                if self._is_closed:
                    return
            buffer = self._staging.take()
            with self._changed:
                key = next(iter(self._queued), None)
                if key is None:
                    self._staging.give_back(buffer)
                    continue
                del self._queued[key]
                future = self._begun[key] = Future()
            try:
                future.set_result(Read(self._read(key, buffer), buffer))
            except BaseException as error:  # raised by `take`
                self._staging.give_back(buffer)
                future.set_exception(error)

    def _discard(self, future: Future[Read]) -> None:
        if future.exception() is None:
            self._staging.give_back(future.result().buffer)
