"""Pending snapshots: boundaries that running sequences will publish, so that others wait instead of computing them.

Sequences are given by number, in order of submission. Invariant: a key is pending exactly while a sequence is due to
publish it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PendingSnapshots:
    """Publishers of each pending key. taken_over: numbers of running sequences that publish in place of failed ones,
    also for readers that were submitted before them."""

    def __init__(self) -> None:
        self._publishers: dict[bytes, list[int]] = {}
        self._boundaries: dict[int, deque[tuple[int, bytes]]] = {}  # number -> positions and keys, ascending
        self.taken_over: set[int] = set()

    def __len__(self) -> int:
        return len(self._publishers)

    def publishers(self, key: bytes | None) -> list[int] | tuple[int, ...]:
        """Return the numbers of the sequences that will publish a key, in the order of `add`; none for None."""
        return self._publishers.get(key, ()) if key is not None else ()

    def is_pending_from(self, number: int, key: bytes | None) -> bool:
        """Return whether the key will be published by the sequence `number`, or by any sequence that took over from a
        failed one."""
        publishers = self.publishers(key)
        return number in publishers or not self.taken_over.isdisjoint(publishers)

    def longest(self, keys: dict[int, bytes], above: int, below: int) -> bytes | None:
        """Return the key of the longest pending position p with above < p < below; None if there is none.

        keys: by position, ascending.
        """
        for position in reversed(keys):
            if position <= above:
                break
            if position < below and keys[position] in self._publishers:
                return keys[position]
        return None

    def add(self, number: int, boundaries: Iterable[tuple[int, bytes]]) -> None:
        """Add the positions and keys, ascending, that a sequence will publish."""
        for boundary in boundaries:
            self._boundaries.setdefault(number, deque()).append(boundary)
            self._publishers.setdefault(boundary[1], []).append(number)

    def take_over(self, number: int, boundaries: Iterable[tuple[int, bytes]]) -> None:
        """Add what a failed sequence was to publish to a sequence that is about to run."""
        self.add(number, sorted([*self.remove(number), *boundaries]))
        self.taken_over.add(number)

    def remove(self, number: int, end: int | None = None) -> list[tuple[int, bytes]]:
        """Remove and return a sequence's boundaries up to the position `end`; without an end, all of them."""
        boundaries, removed = self._boundaries.get(number), list[tuple[int, bytes]]()
        if boundaries is None:
            return removed
        while boundaries and (end is None or boundaries[0][0] <= end):
            removed.append(boundaries.popleft())
            publishers = self._publishers[removed[-1][1]]
            publishers.remove(number)
            if not publishers:
                del self._publishers[removed[-1][1]]
        if not boundaries:
            del self._boundaries[number]
            self.taken_over.discard(number)
        return removed
