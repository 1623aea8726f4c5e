"""Eviction: which snapshots go when a store is full, so that its size limit holds at every instant.

Must not know: who reads them. The least valuable snapshot without children goes first, so an ancestor always
outlives its descendants. A snapshot's value is the tokens that one byte of it saves: (position - parent's
position) / bytes, times its uses + 1, plus the value that had been reached by evictions when it was last used
(greedy-dual-size-frequency: Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency
caching policy", 1998). So what is not used loses against newer snapshots step by step, without a number tuned
by hand.
"""

from __future__ import annotations

from typing import NamedTuple

from apcbatch.store.index import Index
from apcbatch.store.objects import Objects


def evict_one(index: Index, objects: Objects, protected: set[bytes]) -> int | None:
    """Remove the least valuable snapshot; returns the bytes freed, None where nothing may go. Inside a
    transaction."""
    victim = index.least_valuable(protected)
    if victim is None:
        return None
    index.delete(victim.key)
    index.advance_clock(victim.priority)
    objects.remove(victim.key)
    return victim.num_bytes


class Room(NamedTuple):
    """Whether there is room for a snapshot, and how many had to go for it."""

    is_there: bool
    num_evicted: int


def make_room(
    index: Index, objects: Objects, num_bytes: int, limit_bytes: int, protected: set[bytes]
) -> Room:
    """Evict until num_bytes more fit below the limit, counting what every process is writing now.

    Nothing goes where they cannot fit. Inside a transaction.
    """
    room = limit_bytes - index.reserved_bytes() - num_bytes
    if room < 0:
        return Room(False, 0)
    num_evicted = 0
    while index.totals()[1] > room:
        if evict_one(index, objects, protected) is None:
            return Room(False, num_evicted)
        num_evicted += 1
    return Room(True, num_evicted)
