"""Groups that could begin: the longest remaining path first, and among nearly equal ones where their states lie.

Must not know: the seam, units. Groups that make states for others lie apart, so that it costs nothing to pass them over
where there is little room for states.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from apcbatch.cluster.items import Group

Entry = tuple[float, int, Group]
Heap = list[Entry]
MOST_LOOKED_AT = 8
NEARLY = 0.8  # of the longest path


class ReadyQueue:
    """The groups that wait for nothing. seconds: the work in them."""

    def __init__(self) -> None:
        self._makers: Heap = []
        self._others: Heap = []
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._makers) + len(self._others)

    def __iter__(self) -> Iterator[Group]:
        return (entry[2] for heap in (self._makers, self._others) for entry in heap)

    def push(self, group: Group) -> None:
        """A group waits for nothing any more."""
        self.seconds += group.seconds
        self._push(group)

    def pop(self, node: str, room: float = float("inf"), is_idle: bool = True) -> Group | None:
        """The next group for a worker on a node; None if there is none for it. room: for so many more
        states; if that is not infinite, those groups come first that make none, and none comes that leaves more.
        is_idle: whether the worker has nothing else, so that it may have a group that is to be alone."""
        best: Group | None = None
        if room == float("inf"):
            candidates = self._candidates(is_idle, NEARLY, self._makers, self._others)
            best = max(candidates, key=lambda group: _bytes_on(group, node), default=None)
        else:
            candidates = self._candidates(is_idle, 0.0, self._others)
            candidates = candidates or self._candidates(is_idle, 0.0, self._makers)
            best = min(candidates, key=lambda group: group.growth, default=None)
            if best is not None and best.growth > max(0, room):
                best = None
        for group in candidates:
            if group is not best:
                self._push(group)
        if best is not None:
            self.seconds -= best.seconds
        return best

    def clear(self) -> list[Group]:
        """Take everything out."""
        groups = list(self)
        self._makers, self._others, self.seconds = [], [], 0.0
        return groups

    def _candidates(self, is_idle: bool, least: float, *places: Heap) -> list[Group]:
        """Take out the groups to choose from, by priority: none below this share of the first one's."""
        found: list[Group] = []
        refused: list[Group] = []
        while len(found) < MOST_LOOKED_AT and len(refused) < MOST_LOOKED_AT:
            heaps = [heap for heap in places if heap]
            if not heaps:
                break
            heap = min(heaps, key=_first_key)
            if found and heap[0][2].priority < least * found[0].priority:
                break
            group = heapq.heappop(heap)[2]
            (found if is_idle or not group.is_alone else refused).append(group)
        for group in refused:
            self._push(group)
        return found

    def _push(self, group: Group) -> None:
        heapq.heappush(self._makers if group.num_made else self._others, (-group.priority, group.number, group))


def _first_key(heap: Heap) -> tuple[float, int]:
    return heap[0][:2]


def _bytes_on(group: Group, node: str) -> int:
    """The bytes that a node has of what a group resumes from."""
    return sum(state.num_bytes for state in group.needs if node in state.nodes)
