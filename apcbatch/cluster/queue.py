"""Groups that could begin: the longest remaining path first, and among nearly equal ones where their states lie.

Must not know: the seam, units. Invariant: everything under one root is done by workers of one class, for states never
cross classes; a group whose root has begun nowhere may go to any.
"""

from __future__ import annotations

import heapq

from apcbatch.cluster.items import Group

Entry = tuple[float, int, Group]
MOST_LOOKED_AT = 8
MOST_LOOKED_AT_IF_TIGHT = 64
NEARLY = 0.8  # of the longest path


class ReadyQueue:
    """Ready groups by class. A class is the fingerprint of its workers."""

    def __init__(self) -> None:
        self._heaps: dict[str | None, list[Entry]] = {None: []}
        self._class_of: dict[int, str] = {}  # by family
        self._begun: set[str] = set()
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
        candidates: list[Entry] = []
        while len(candidates) < (MOST_LOOKED_AT_IF_TIGHT if is_tight else MOST_LOOKED_AT):
            heaps = [heap for heap in (self._heaps[None], self._heaps.get(class_)) if heap]
            if not heaps:
                break
            heap = min(heaps, key=lambda heap: heap[0][:2])
            if candidates and not is_tight and heap[0][0] > NEARLY * candidates[0][0]:
                break
            candidates.append(heapq.heappop(heap))
        if not candidates:
            return None
        if is_tight:
            best = min(candidates, key=lambda entry: entry[2].growth)
            if best[2].growth > max(0, room):
                for entry in candidates:
                    self._push(entry[2])
                return None
        else:
            best = max(candidates, key=lambda entry: _bytes_on(entry[2], node))
        for entry in candidates:
            if entry is not best:
                self._push(entry[2])
        group = best[2]
        self.seconds -= group.seconds
        self._begun.add(class_)
        for item in group.items:
            self._class_of.setdefault(item.family, class_)
        return group

    def classes(self) -> set[str]:
        """Those that have begun anything."""
        return set(self._begun)

    def forget_class(self, class_: str) -> set[int]:
        """No worker of a class is left: what it began goes to any other. Returns those families."""
        self._begun.discard(class_)
        families = {family for family, of in self._class_of.items() if of == class_}
        for family in families:
            del self._class_of[family]
        for entry in self._heaps.pop(class_, []):
            self._push(entry[2])
        return families

    def clear(self) -> list[Group]:
        """Take everything out."""
        groups = [entry[2] for heap in self._heaps.values() for entry in heap]
        self._heaps, self.seconds = {None: []}, 0.0
        return groups

    def _push(self, group: Group) -> None:
        heap = self._heaps.setdefault(self._class_of.get(group.items[0].family), [])
        heapq.heappush(heap, (-group.priority, group.number, group))


def _bytes_on(group: Group, node: str) -> int:
    """The bytes that a node has of what a group resumes from."""
    return sum(state.num_bytes for state in group.needs if node in state.nodes)
