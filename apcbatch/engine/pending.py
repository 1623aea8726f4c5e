"""Pending snapshots: those that sequences will publish, so that others wait instead of computing them.

Sequences are given by number, in order of submission. A pending snapshot has two of them: its leader, the sequence that
was to publish it when its readers were submitted, and its publisher, which is another sequence if the leader has
failed. Invariant: a key is pending exactly while a sequence is due to publish it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Promise(NamedTuple):
    """Pending snapshot of one publisher. leader: number by which its readers know it."""

    position: int
    key: bytes
    leader: int


class PendingSnapshots:
    """Publishers of each pending key."""

    def __init__(self) -> None:
        self._publishers: dict[bytes, dict[int, int]] = {}  # key -> leader -> publisher
        self._promises: dict[int, deque[Promise]] = {}  # by publisher, positions ascending

    def __len__(self) -> int:
        return len(self._publishers)

    def publishers(self, key: bytes | None) -> Mapping[int, int]:
        """Return leader -> publisher of the pending snapshots of a key; empty for None."""
        return self._publishers.get(key, {}) if key is not None else {}

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
        """Add the snapshots that a sequence will publish, as (position, key); it is their leader."""
        self.take_over(number, [Promise(position, key, number) for position, key in boundaries])

    def take_over(self, number: int, promises: Iterable[Promise]) -> None:
        """Make a sequence that is about to run the publisher of a failed one's snapshots."""
        both = sorted([*self.remove(number), *promises])
        if both:
            self._promises[number] = deque(both)
        for promise in both:
            self._publishers.setdefault(promise.key, {})[promise.leader] = number

    def remove(self, number: int, end: int | None = None) -> list[Promise]:
        """Remove and return the pending snapshots of a publisher up to the position `end`; all of them for None."""
        promises, removed = self._promises.get(number), list[Promise]()
        if promises is None:
            return removed
        while promises and (end is None or promises[0].position <= end):
            removed.append(promises.popleft())
            publishers = self._publishers[removed[-1].key]
            del publishers[removed[-1].leader]
            if not publishers:
                del self._publishers[removed[-1].key]
        if not promises:
            del self._promises[number]
        return removed
