"""Groups that could begin: the longest remaining path first, and among nearly equal ones where their states lie.

Must not know: the seam, units. Invariant: everything of one family is done by workers of one class, for states never
cross classes; a group whose family has begun nowhere may go to any.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from apcbatch.cluster.items import Group
from apcbatch.cluster.shares import Shares

Entry = tuple[float, int, Group]
MOST_LOOKED_AT = 8
MOST_LOOKED_AT_IF_TIGHT = 64
NEARLY = 0.8  # of the longest path


class ReadyQueue:
    """Ready groups by class. A class is the fingerprint of its workers."""

    def __init__(self) -> None:
        self._heaps: dict[str | None, list[Entry]] = {None: []}
        self.shares = Shares()
        self.seconds = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def push(self, group: Group) -> None:
        """A group waits for nothing any more."""
        self.seconds += group.seconds
        self._push(group)

    def pop(self, class_: str, node: str, room: float = float("inf")) -> Group | None:
        """The next group for a worker of a class on a node; None if there is none for it. room: for so many more
        states; if that is not infinite, those groups come first that leave the fewest, and none that leaves more."""
        is_tight = room != float("inf")
        candidates = self._candidates(class_, is_tight)
        best: Group | None = None
        if candidates and is_tight:
            best = min(candidates, key=lambda group: group.growth)
            best = best if best.growth <= max(0, room) else None
        elif candidates:
            best = max(candidates, key=lambda group: _bytes_on(group, node))
        for group in candidates:
            if group is not best:
                self._push(group)
        if best is not None:
            self.seconds -= best.seconds
            self.shares.begin(best, class_)
        return best

    def forget_class(self, class_: str) -> set[int]:
        """No worker of a class is left: what it began goes to any other. Returns those families."""
        families = self.shares.forget_class(class_)
        for entry in self._heaps.pop(class_, []):
            self._push(entry[2])
        return families

    def of_class(self, class_: str) -> list[Group]:
        """The ready groups that belong to a class."""
        return [entry[2] for entry in self._heaps.get(class_, ())]

    def remove(self, groups: Collection[Group]) -> None:
        """Take some of the ready groups out."""
        for group in groups:
            heap = self._heaps[self.shares.class_of(group)]
            heap.remove((-group.priority, group.number, group))
            self.seconds -= group.seconds
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def clear(self) -> list[Group]:
        """Take everything out."""
        groups = [entry[2] for heap in self._heaps.values() for entry in heap]
        self._heaps, self.seconds = {None: []}, 0.0
        return groups

    def _candidates(self, class_: str, is_tight: bool) -> list[Group]:
        """Take out the groups to choose from, by priority."""
        most, least = (MOST_LOOKED_AT_IF_TIGHT, 0.0) if is_tight else (MOST_LOOKED_AT, NEARLY)
        found: list[Group] = []
        refused: list[Group] = []
        while len(found) < most and len(refused) < MOST_LOOKED_AT:
            heaps = [heap for heap in (self._heaps[None], self._heaps.get(class_)) if heap]
            if not heaps:
                break
            heap = min(heaps, key=_first_key)
            if found and heap[0][2].priority < least * found[0].priority:
                break
            is_root = heap is self._heaps[None]
            group = heapq.heappop(heap)[2]
            (refused if is_root and not self.shares.may_begin(group, class_) else found).append(group)
        for group in refused:
            self._push(group)
        return found

    def _push(self, group: Group) -> None:
        heap = self._heaps.setdefault(self.shares.class_of(group), [])
        heapq.heappush(heap, (-group.priority, group.number, group))


def _first_key(heap: list[Entry]) -> tuple[float, int]:
    return heap[0][:2]


def _bytes_on(group: Group, node: str) -> int:
    """The bytes that a node has of what a group resumes from."""
    return sum(state.num_bytes for state in group.needs if node in state.nodes)
