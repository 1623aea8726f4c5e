"""Eviction: which snapshots go when a store is full, so that its size limit holds at every instant.

Must not know: who reads them. The least valuable snapshot without children goes first, so an ancestor always
outlives its descendants. A snapshot's value is the tokens that one byte of it saves: (position - parent's
position) / bytes, times its uses + 1, plus the value that had been reached by evictions when it was last used
(greedy-dual-size-frequency: Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency
caching policy", 1998). So what is not used loses against newer snapshots step by step, without a number tuned
by hand.
"""

from __future__ import annotations

from apcbatch.store.entry import Entry
from apcbatch.store.index import Index
from apcbatch.store.objects import Objects


def evict_one(index: Index, objects: Objects, protected: set[bytes]) -> Entry | None:
    """Remove the least valuable snapshot and return what it was; None where nothing may go. Inside a
    transaction."""
    victim = index.least_valuable(protected)
    if victim is not None:
        index.advance_clock(victim.priority)
        drop(victim, index, objects)
    return victim


def drop(entry: Entry, index: Index, objects: Objects) -> None:
    """Remove a snapshot just found in the index, row and file. Where the row names no file, its key may be
    damaged: then the file that the key's first 8 bytes, the row's id, lead to is the one that was counted."""
    index.remove(entry)
    if not objects.remove(entry.key):
        objects.remove_namesakes(entry.key)


class Room:
    """What may still be written below the limit, counting what every process is writing now. For one
    transaction."""

    def __init__(self, index: Index, objects: Objects, limit_bytes: int, protected: set[bytes]) -> None:
        """protected: keys that are not evicted. num_evicted: how many others were."""
        self.num_evicted = 0
        self._index = index
        self._objects = objects
        self._protected = protected
        self._most_bytes = limit_bytes - index.reserved_bytes()
        self._free_bytes = self._most_bytes - index.totals()[1]

    def make(self, num_bytes: int) -> bool:
        """Take num_bytes, after evicting what has to go for them; nothing goes where they cannot fit."""
        if num_bytes > self._most_bytes:
            return False
        while self._free_bytes < num_bytes:
            victim = evict_one(self._index, self._objects, self._protected)
            if victim is None:
                return False
            self._free_bytes += victim.num_bytes
            self.num_evicted += 1
        self._most_bytes -= num_bytes
        self._free_bytes -= num_bytes
        return True
