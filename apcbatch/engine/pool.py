"""Snapshots in memory with their slots and KV pages, and their eviction.

An example with a capacity of three snapshots. A was read last, B before it, C first. C is awaited by a plan, and B is
being written.
    Insert D, not awaited: evict A, the only one neither pinned nor awaited.
    Insert E, not awaited: evict D.
    Insert F, awaited: evict E.
    Insert G, not awaited: wait for the write of B, then evict B.
    Insert H, awaited: evict G. The next awaited snapshot would evict C, the least recently read.

Invariants: a pinned snapshot (being restored or written) is never dropped. An awaited one is evicted only when no other
is left, and only for another awaited one or, if nothing runs, for the KV pages of a sequence. The bytes held never
exceed the capacity. An evicted key is remembered for a while, so that a later miss can say `evicted`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PageArray = npt.NDArray[np.int64]
NO_PAGES: PageArray = np.empty(0, np.int64)
FORGOTTEN_KEYS = 65_536


class PagePool:
    """Reference counts of `num_pages` KV pages, shared by sequences and snapshots. An unused page costs no memory.
    refs: page -> number of references, (num_pages,) int32."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = np.zeros(num_pages, np.int32)
        self._freed: list[int] = []
        self._num_used = 0  # first page that was never allocated

    @property
    def num_free(self) -> int:
        """Number of pages without a reference."""
        return len(self._freed) + self.num_pages - self._num_used

    def allocate(self) -> int:
        """Return a free page with one reference. Raises IndexError if none is free, which callers check first."""
        if self._freed:
            page = self._freed.pop()
        elif self._num_used < self.num_pages:
            page, self._num_used = self._num_used, self._num_used + 1
        else:
            raise IndexError("no page is free")
        self.refs[page] = 1
        return page

    def share(self, pages: PageArray) -> None:
        """Add one reference to each page."""
        self.refs[pages] += 1

    def release(self, pages: PageArray) -> int:
        """Drop one reference to each page. Return how many became free."""
        self.refs[pages] -= 1
        freed = pages[self.refs[pages] == 0]
        self._freed.extend(freed[::-1].tolist())  # its first pages are allocated first again
        return len(freed)


@dataclass(slots=True, eq=False)
class Snapshot:
    """Snapshot in the pool. pages: cover exactly its `position` tokens, the last page in part. reads_left: planned
    requests that have not resumed from it yet. for_later: kept for future runs. was_read: a sequence has resumed from
    it. stored: the store has it, or its write is under way. refused: the store refused it when it was last offered.
    store_parent: nearest ancestor in the store, as (key, position)."""

    key: bytes
    position: int
    slot: int
    pages: PageArray
    pins: int = 0
    reads_left: int = 0
    for_later: bool = False
    was_read: bool = False
    stored: bool = False
    refused: bool = False
    store_parent: tuple[bytes, int] | None = None


class SnapshotPool:
    """Snapshots by key, least recently consumed first: a snapshot is consumed when it is inserted, and whenever a
    sequence resumes from it. finish_writes: waits for the writes in progress, which unpins their snapshots; returns
    False if there are none."""

    def __init__(
        self,
        slots: range,
        pages: PagePool,
        slot_bytes: int,
        page_bytes: int,
        capacity_bytes: int,
        finish_writes: Callable[[], bool],
    ) -> None:
        self._held: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._free_slots = array("i", reversed(slots))  # hundreds of thousands, of a small model
        self._pages = pages
        self._page_holders: dict[int, int] = {}
        self._slot_bytes, self._page_bytes = slot_bytes, page_bytes
        self.capacity_bytes = capacity_bytes
        self._finish_writes = finish_writes
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()
        self.num_reserved = 0
        self._idle_slots: dict[int, bytes] = {}  # slots reserved for unawaited snapshots -> key
        self._being_written: set[int] = set()  # of these, the slots that a pass in flight writes
        self._taken: set[tuple[bytes, int]] = set()  # reservations whose slot was taken over
        self.peak_held = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Snapshot]:
        """Iterate over the snapshots, least recently consumed first."""
        return iter(self._held.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of the held and reserved slots, and of the pages that snapshots refer to."""
        slots = len(self._held) + self.num_reserved
        return slots * self._slot_bytes + self.num_pages * self._page_bytes

    @property
    def num_pages(self) -> int:
        """Pages that snapshots refer to."""
        return len(self._page_holders)

    def peek(self, key: bytes) -> Snapshot | None:
        """Return the snapshot of a key, without marking it as consumed."""
        return self._held.get(key)

    def refused(self) -> list[Snapshot]:
        """Return the snapshots that the store refused, by ascending position."""
        return sorted((one for one in self if one.refused), key=lambda one: one.position)

    def holds(self, snapshot: Snapshot) -> bool:
        """Return whether this snapshot is still in the pool; a dropped one's slot may have another state."""
        return self._held.get(snapshot.key) is snapshot

    def consume(self, snapshot: Snapshot) -> None:
        """Record that a sequence resumes from a snapshot. It becomes the most recently consumed one, evicted last."""
        snapshot.was_read = True
        self._held.move_to_end(snapshot.key)

    def was_dropped(self, key: bytes) -> bool:
        """Return whether a snapshot of this key was evicted, or refused for lack of capacity, earlier in this run. The
        last FORGOTTEN_KEYS such keys are known."""
        return key in self._forgotten

    def count_read(self, key: bytes) -> None:
        """Drop one pending reader of a snapshot. With the last one, drop the snapshot too, unless it is pinned or kept
        for future runs."""
        snapshot = self._held.get(key)
        if snapshot is not None and snapshot.reads_left:
            snapshot.reads_left -= 1
            if not snapshot.reads_left and not snapshot.for_later and not snapshot.pins:
                self.drop(snapshot)

    def reserve(self, key: bytes, awaited: bool) -> int | None:
        """Reserve a slot for a snapshot about to be written. Return None if nothing may be evicted for it.

        awaited: whether a request of this run will read the snapshot. If so, it may also take the slot of an unawaited
        snapshot that a pass in flight writes (the pass that computes the awaited one overwrites the slot later), or
        else that of another awaited snapshot.
        """
        while not self._free_slots or self.held_bytes + self._slot_bytes > self.capacity_bytes:
            if self.drop_one(awaited=False):
                continue
            if awaited and self._being_written:
                return self._take_over()
            if not self.drop_one(awaited):
                self._forget(key)
                return None
        self.num_reserved += 1
        slot = self._free_slots.pop()
        if not awaited:
            self._idle_slots[slot] = key
        return slot

    def passes_begun(self) -> None:
        """Mark all slots reserved for unawaited snapshots as being written by passes in flight."""
        self._being_written = set(self._idle_slots)

    def _take_over(self) -> int:
        """Take over a slot that a pass in flight writes an unawaited snapshot to. That snapshot is not published."""
        slot = self._being_written.pop()
        key = self._idle_slots.pop(slot)
        self._taken.add((key, slot))
        self._forget(key)
        return slot

    def insert(
        self, key: bytes, position: int, slot: int, pages: PageArray, reads: int = 0, awaited: bool = False
    ) -> Snapshot | None:
        """Publish the snapshot written into a reserved slot. Return None if its pages do not fit, or if the slot was
        taken over.

        reads: number of planned requests that will resume from it. awaited: as in `reserve`. A key that is already held
        keeps its first copy.
        """
        if (key, slot) in self._taken:
            self._taken.discard((key, slot))
            return None
        self._give_back(slot)
        # slots reserved for unawaited snapshots do not count against an awaited one
        capacity = self.capacity_bytes + awaited * len(self._idle_slots) * self._slot_bytes
        held = self._held.get(key)
        if held is not None:
            self._free_slots.append(slot)
            held.reads_left += reads
            return held
        snapshot = Snapshot(key, position, slot, pages.copy(), reads_left=reads)
        self._pages.share(snapshot.pages)
        for page in snapshot.pages.tolist():
            self._page_holders[page] = self._page_holders.get(page, 0) + 1
        self._held[key] = snapshot
        self._forgotten.pop(key, None)
        snapshot.pins += 1
        while self.held_bytes > capacity and self.drop_one(awaited):
            pass
        snapshot.pins -= 1
        if self.held_bytes > capacity:
            self._evict(snapshot)
            return None
        self.peak_held = max(self.peak_held, len(self._held))
        return snapshot

    def cancel(self, key: bytes, slot: int) -> None:
        """Free the slot that was reserved for this key and not written."""
        if (key, slot) in self._taken:
            self._taken.discard((key, slot))
            return
        self._give_back(slot)
        self._free_slots.append(slot)

    def _give_back(self, slot: int) -> None:
        """End the reservation of a slot."""
        self.num_reserved -= 1
        self._idle_slots.pop(slot, None)
        self._being_written.discard(slot)

    def drop_one(self, awaited: bool) -> bool:
        """Evict one snapshot and return True; return False if none may be evicted.

        Choose the least recently consumed one that is neither awaited nor pinned. If there is none, wait for the writes
        in progress, which unpins their snapshots, and choose again. If there is still none and `awaited` is true,
        choose the least recently consumed awaited one that is not pinned."""
        victim = self._idle()
        if victim is None and self._finish_writes():
            victim = self._idle()
        if victim is None and awaited:
            victim = next((snapshot for snapshot in self if not snapshot.pins), None)
        if victim is not None:
            self._evict(victim)
        return victim is not None

    def drop(self, snapshot: Snapshot) -> None:
        """Drop one snapshot."""
        del self._held[snapshot.key]
        self._free_slots.append(snapshot.slot)
        for page in snapshot.pages.tolist():
            self._page_holders[page] -= 1
            if not self._page_holders[page]:
                del self._page_holders[page]
        self._pages.release(snapshot.pages)

    def _idle(self) -> Snapshot | None:
        """Return the least recently consumed snapshot that is neither pinned nor awaited."""
        return next((one for one in self if not one.pins and not one.reads_left), None)

    def _evict(self, snapshot: Snapshot) -> None:
        self.drop(snapshot)
        self._forget(snapshot.key)
        self.evicted += 1

    def _forget(self, key: bytes) -> None:
        self._forgotten[key] = None
        if len(self._forgotten) > FORGOTTEN_KEYS:
            self._forgotten.popitem(last=False)
