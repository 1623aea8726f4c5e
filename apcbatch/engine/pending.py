"""Pending snapshots: those that sequences will publish, so that others wait instead of computing them.

Sequences are given by number, in order of submission. A sequence that publishes in place of a failed one does so under
the failed one's number, by which its readers know it. Invariant: a key is pending exactly while a sequence is due to
publish it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Promise(NamedTuple):
    """A snapshot that a sequence will publish. planned: number of the sequence that was to publish it first."""

    position: int
    key: bytes
    planned: int


class PendingSnapshots:
    """Publishers of each pending key."""

    def __init__(self) -> None:
        self._publishers: dict[bytes, dict[int, int]] = {}
        self._promises: dict[int, deque[Promise]] = {}  # by number, positions ascending

    def __len__(self) -> int:
        return len(self._publishers)

    def publishers(self, key: bytes | None) -> Mapping[int, int]:
        """Return the sequences that will publish a key, by the number that was to publish it first; none for None."""
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
        """Add the positions and keys that a sequence will publish."""
        self.take_over(number, [Promise(position, key, number) for position, key in boundaries])

    def take_over(self, number: int, promises: Iterable[Promise]) -> None:
        """Add what a failed sequence was to publish to a sequence that is about to run."""
        both = sorted([*self.remove(number), *promises])
        if both:
            self._promises[number] = deque(both)
        for promise in both:
            self._publishers.setdefault(promise.key, {})[promise.planned] = number

    def remove(self, number: int, end: int | None = None) -> list[Promise]:
        """Remove and return what a sequence publishes up to the position `end`; without an end, all of it."""
        promises, removed = self._promises.get(number), list[Promise]()
        if promises is None:
            return removed
        while promises and (end is None or promises[0].position <= end):
            removed.append(promises.popleft())
            publishers = self._publishers[removed[-1].key]
            del publishers[removed[-1].planned]
            if not publishers:
                del self._publishers[removed[-1].key]
        if not promises:
            del self._promises[number]
        return removed
