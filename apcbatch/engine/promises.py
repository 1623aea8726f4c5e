"""Boundaries that sequences are yet to publish: others may wait for them instead of computing them too.

Must not know: sequences, snapshots; it knows numbers, positions and keys. Invariant: a key is here exactly as long as
somebody still owes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class Promises:
    """Who owes which boundary, by a sequence's number in the order of submission."""

    def __init__(self) -> None:
        self._makers: dict[bytes, list[int]] = {}
        self._owed: dict[int, deque[tuple[int, bytes]]] = {}  # by number: positions and keys, ascending

    def __len__(self) -> int:
        return len(self._makers)

    def makers(self, key: bytes | None) -> Sequence[int]:
        """The numbers of those who will publish a boundary, in the order of their promises; nobody for None."""
        return self._makers.get(key, ()) if key is not None else ()

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

    def settle(self, number: int, end: int | None = None) -> None:
        """What a sequence owes up to the position `end` is published; without an end, nothing more will come."""
        owed = self._owed.get(number)
        if owed is None:
            return
        while owed and (end is None or owed[0][0] <= end):
            _, key = owed.popleft()
            makers = self._makers[key]
            makers.remove(number)
            if not makers:
                del self._makers[key]
        if not owed:
            del self._owed[number]
