"""Snapshots in RAM and their KV pages: which keys are held, in which slot and pages, and what is evicted for room.

An example with room for three: A was read last, B before it, C before that; a plan waits for C, and B is being written.
    D comes, and no plan waits for it: A goes, the only one that is neither pinned nor awaited.
    E comes, and no plan waits for it: D goes.
    F comes, and a plan waits for it: E goes.
    G comes, and no plan waits for it: the write of B is waited for, then B goes.
    H comes, a plan waits for it: G goes. The next awaited one takes the place of C, the one read longest ago.

Invariants: a pinned snapshot (being restored or written) is never
dropped; one that a plan waits for goes only when there is no other, for another one that it waits for; the bytes held
never exceed the capacity; a dropped key is remembered for a while, so that a later miss can say `evicted`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PageArray = npt.NDArray[np.int64]
NO_PAGES: PageArray = np.empty(0, np.int64)
FORGOTTEN_KEYS = 65_536


class PagePool:
    """Reference counts of `num_pages` KV pages, shared by sequences and snapshots. A page that was never used costs no
    memory."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._refs = np.zeros(num_pages, np.int32)
        self._freed: list[int] = []
        self._num_used = 0  # pages from here on were never allocated

    @property
    def num_free(self) -> int:
        """Pages without a reference."""
        return len(self._freed) + self.num_pages - self._num_used

    def allocate(self) -> int:
        """Return a free page with one reference; IndexError if there is none (callers make sure that there is)."""
        if self._freed:
            page = self._freed.pop()
        elif self._num_used < self.num_pages:
            page, self._num_used = self._num_used, self._num_used + 1
        else:
            raise IndexError("no page is free")
        self._refs[page] = 1
        return page

    def share(self, pages: PageArray) -> None:
        """Add one reference to each page."""
        self._refs[pages] += 1

    def release(self, pages: PageArray) -> int:
        """Drop one reference to each page; returns how many became free."""
        self._refs[pages] -= 1
        freed = pages[self._refs[pages] == 0]
        self._freed.extend(freed.tolist())
        return len(freed)


@dataclass(slots=True, eq=False)
class Snapshot:
    """One held snapshot. pages cover exactly its `position` tokens (the last one in part). reads_left: how many
    requests of the plan will still resume from it. for_later: kept for future runs. was_read: a sequence has resumed
    from it. stored: the store has it, or its write is under way; store_parent: its nearest ancestor that the store has,
    as (key, position)."""

    key: bytes
    position: int
    slot: int
    pages: PageArray
    pins: int = 0
    reads_left: int = 0
    for_later: bool = False
    was_read: bool = False
    stored: bool = False
    store_parent: tuple[bytes, int] | None = None


class SnapshotPool:
    """Held snapshots by key, least recently consumed first. finish_writes: waits for the writes under way, which unpins
    what they read; False if there are none."""

    def __init__(
        self,
        slots: range,
        pages: PagePool,
        slot_bytes: int,
        page_bytes: int,
        capacity_bytes: int,
        finish_writes: Callable[[], bool] = lambda: False,
    ) -> None:
        self._held: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._free_slots = list(reversed(slots))
        self._pages = pages
        self._page_holders: dict[int, int] = {}
        self._slot_bytes, self._page_bytes = slot_bytes, page_bytes
        self.capacity_bytes = capacity_bytes
        self._finish_writes = finish_writes
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()
        self.num_reserved = 0
        self._idle_slots: dict[int, bytes] = {}  # reserved for snapshots that no plan waits for: slot -> key
        self._being_written: set[int] = set()  # those of them that a pass in flight writes
        self._taken: set[tuple[bytes, int]] = set()  # reservations that were given to another snapshot
        self.peak_held = 0
        self.evicted = 0
        self.on_drop: Callable[[bytes, bool], None] | None = None  # called with each key, and whether it is evicted

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots that are held or reserved, and of the pages that snapshots refer to."""
        slots = len(self._held) + self.num_reserved
        return slots * self._slot_bytes + len(self._page_holders) * self._page_bytes

    def peek(self, key: bytes) -> Snapshot | None:
        """Return the snapshot of a key, without refreshing it."""
        return self._held.get(key)

    def holds(self, snapshot: Snapshot) -> bool:
        """Return whether this very snapshot is still here: the slot of one that was dropped may have another's
        state."""
        return self._held.get(snapshot.key) is snapshot

    def consume(self, snapshot: Snapshot) -> None:
        """Note that a snapshot was restored: it is now the last to go."""
        snapshot.was_read = True
        self._held.move_to_end(snapshot.key)

    def was_dropped(self, key: bytes) -> bool:
        """Return whether a snapshot of this key was held, or refused for lack of room, earlier in this run."""
        return key in self._forgotten

    def count_read(self, key: bytes) -> None:
        """Drop one pending reader of a snapshot; with the last one the snapshot goes."""
        snapshot = self._held.get(key)
        if snapshot is not None and snapshot.reads_left:
            snapshot.reads_left -= 1
            if not snapshot.reads_left and not snapshot.for_later and not snapshot.pins:
                self.drop(snapshot)

    def reserve(self, key: bytes, awaited: bool) -> int | None:
        """Return a slot for a snapshot that is about to be written, or None if nothing may go for it.

        awaited: a request of this run will read it, so that it may take the place of another awaited one, and before
        that the slot of an unawaited one that a pass in flight writes: its own pass writes there later.
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
        """Note that the passes that write all reserved slots are in flight."""
        self._being_written = set(self._idle_slots)

    def _take_over(self) -> int:
        """Take a reserved slot; its snapshot will not be published."""
        slot = self._being_written.pop()
        key = self._idle_slots.pop(slot)
        self._taken.add((key, slot))
        self._forget(key)
        return slot

    def insert(
        self, key: bytes, position: int, slot: int, pages: PageArray, reads: int = 0, awaited: bool = False
    ) -> Snapshot | None:
        """Publish what was written into a reserved slot; None if there is no room for its pages, or if the slot was
        given to another snapshot.

        reads: how many requests of the plan will resume from it. awaited: as in `reserve`. A key that is already
        held keeps its first copy.
        """
        if (key, slot) in self._taken:
            self._taken.discard((key, slot))
            return None
        self._give_back(slot)
        # Slots reserved for unawaited snapshots do not count against an awaited one.
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
        """Give back the slot that was reserved for this key and not written."""
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
        """Drop the least recently consumed snapshot that no plan waits for and that is not pinned. If there is none,
        let the writes under way unpin one; if that does not help either and `awaited`, drop one that a plan waits for.
        Returns whether one was dropped."""
        victim = self._idle()
        if victim is None and self._finish_writes():
            victim = self._idle()
        if victim is None and awaited:
            victim = next((snapshot for snapshot in self._held.values() if not snapshot.pins), None)
        if victim is not None:
            self._evict(victim)
        return victim is not None

    def own_bytes(self, snapshot: Snapshot) -> int:
        """Return the bytes of the slot of a held snapshot, and of the pages that no other one refers to."""
        pages = sum(self._page_holders[page] == 1 for page in snapshot.pages.tolist())
        return self._slot_bytes + pages * self._page_bytes

    def drop(self, snapshot: Snapshot, evicted: bool = False) -> None:
        """Drop one snapshot. evicted: for lack of room."""
        if self.on_drop is not None:
            self.on_drop(snapshot.key, evicted)
        del self._held[snapshot.key]
        self._free_slots.append(snapshot.slot)
        for page in snapshot.pages.tolist():
            self._page_holders[page] -= 1
            if not self._page_holders[page]:
                del self._page_holders[page]
        self._pages.release(snapshot.pages)

    def _idle(self) -> Snapshot | None:
        """Return the least recently consumed snapshot that is neither pinned nor awaited."""
        return next((one for one in self._held.values() if not one.pins and not one.reads_left), None)

    def _evict(self, snapshot: Snapshot) -> None:
        self.drop(snapshot, evicted=True)
        self._forget(snapshot.key)
        self.evicted += 1

    def _forget(self, key: bytes) -> None:
        self._forgotten[key] = None
        if len(self._forgotten) > FORGOTTEN_KEYS:
            self._forgotten.popitem(last=False)
