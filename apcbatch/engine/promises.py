"""Boundaries that sequences are yet to publish: others may wait for them instead of computing them too.

Must not know: sequences, snapshots; it knows numbers, positions and keys. Invariant: a key is here exactly as long as
somebody still owes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class Promises:
    """Who owes which boundary, by a sequence's number in the order of submission. heirs: the numbers of running
    sequences that owe what failed ones did, to readers that were submitted before them too."""

    def __init__(self) -> None:
        self._makers: dict[bytes, list[int]] = {}
        self._owed: dict[int, deque[tuple[int, bytes]]] = {}  # by number: positions and keys, ascending
        self.heirs: set[int] = set()

    def __len__(self) -> int:
        return len(self._makers)

    def makers(self, key: bytes | None) -> Sequence[int]:
        """The numbers of those who will publish a boundary, in the order of their promises; nobody for None."""
        return self._makers.get(key, ()) if key is not None else ()

    def come_from(self, number: int, key: bytes | None) -> bool:
        """Whether a boundary is yet to be published by a sequence, or in place of a failed one."""
        makers = self.makers(key)
        return number in makers or not self.heirs.isdisjoint(makers)

    def longest(self, keys: dict[int, bytes], above: int, below: int) -> bytes | None:
        """The key of the longest promised position p with above < p < below; None if there is none.

        keys: by position, ascending.
        """
        for position in reversed(keys):
            if position <= above:
                break
            if position < below and keys[position] in self._makers:
                return keys[position]
        return None

    def make(self, number: int, boundaries: Iterable[tuple[int, bytes]]) -> None:
        """A sequence will publish these positions and keys, ascending."""
        owed = self._owed.setdefault(number, deque())
        for boundary in boundaries:
            owed.append(boundary)
            self._makers.setdefault(boundary[1], []).append(number)
        if not owed:
            del self._owed[number]

    def inherit(self, number: int, boundaries: Iterable[tuple[int, bytes]]) -> None:
        """A sequence that is about to run will publish these too."""
        self.make(number, sorted([*self.settle(number), *boundaries]))
        self.heirs.add(number)

    def settle(self, number: int, end: int | None = None) -> list[tuple[int, bytes]]:
        """What a sequence owes up to the position `end` is published; without an end, nothing more will come. Returns
        these positions and keys."""
        owed, settled = self._owed.get(number), list[tuple[int, bytes]]()
        if owed is None:
            return settled
        while owed and (end is None or owed[0][0] <= end):
            settled.append(owed.popleft())
            makers = self._makers[settled[-1][1]]
            makers.remove(number)
            if not makers:
                del self._makers[settled[-1][1]]
        if not owed:
            del self._owed[number]
            self.heirs.discard(number)
        return settled
