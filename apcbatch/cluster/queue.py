"""Groups that could begin: the longest remaining path first, and among nearly equal ones where their states lie.

Must not know: the seam, units. Invariant: everything under one root is done by workers of one class, for states never
cross classes; a group whose root has begun nowhere may go to any. Those that make states for others lie apart, so that
it costs nothing to pass them over where there is little room for states.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from apcbatch.cluster.items import Group
from apcbatch.cluster.shares import Shares

Entry = tuple[float, int, Group]
Heap = list[Entry]
MOST_LOOKED_AT = 8
NEARLY = 0.8  # of the longest path


class ReadyQueue:
    """Ready groups by class. A class is the fingerprint of its workers."""

    def __init__(self) -> None:
        self._makers: dict[str | None, Heap] = {}
        self._others: dict[str | None, Heap] = {}
        self.shares = Shares()
        self.seconds = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._makers.values())) + sum(map(len, self._others.values()))

    def __iter__(self) -> Iterator[Group]:
        return (entry[2] for heaps in (self._makers, self._others) for heap in heaps.values() for entry in heap)

    def push(self, group: Group) -> None:
        """A group waits for nothing any more."""
        self.seconds += group.seconds
        self._push(group)

    def pop(self, class_: str, node: str, room: float = float("inf")) -> Group | None:
        """The next group for a worker of a class on a node; None if there is none for it. room: for so many more
        states; if that is not infinite, those groups come first that make none, and none comes that leaves more."""
        best: Group | None = None
        if room == float("inf"):
            candidates = self._candidates(class_, NEARLY, self._makers, self._others)
            best = max(candidates, key=lambda group: _bytes_on(group, node), default=None)
        else:
            candidates = self._candidates(class_, 0.0, self._others) or self._candidates(class_, 0.0, self._makers)
            best = min(candidates, key=lambda group: group.growth, default=None)
            if best is not None and best.growth > max(0, room):
                best = None
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
        for entry in self._makers.pop(class_, []) + self._others.pop(class_, []):
            self._push(entry[2])
        return families

    def clear(self) -> list[Group]:
        """Take everything out."""
        groups = list(self)
        self._makers, self._others, self.seconds = {}, {}, 0.0
        return groups

    def _candidates(self, class_: str, least: float, *places: dict[str | None, Heap]) -> list[Group]:
        """Take out the groups to choose from, by priority: none below this share of the first one's."""
        found: list[Group] = []
        refused: list[Group] = []
        while len(found) < MOST_LOOKED_AT and len(refused) < MOST_LOOKED_AT:
            heaps = [heap for place in places for of in (None, class_) if (heap := place.get(of))]
            if not heaps:
                break
            heap = min(heaps, key=_first_key)
            if found and heap[0][2].priority < least * found[0].priority:
                break
            group = heapq.heappop(heap)[2]
            (found if self.shares.may_have(group, class_) else refused).append(group)
        for group in refused:
            self._push(group)
        return found

    def _push(self, group: Group) -> None:
        place = self._makers if group.num_made else self._others
        heap = place.setdefault(self.shares.class_of(group), [])
        heapq.heappush(heap, (-group.priority, group.number, group))


def _first_key(heap: Heap) -> tuple[float, int]:
    return heap[0][:2]


def _bytes_on(group: Group, node: str) -> int:
    """The bytes that a node has of what a group resumes from."""
    return sum(state.num_bytes for state in group.needs if node in state.nodes)
