"""A compact table of 128-bit keys: which ids were seen, which requests are answered already.

Must not know: files, requests. Open addressing over flat arrays: 24 to 36 bytes a key without values, 36 to
54 with them, where a Python set takes over 100.
"""

from __future__ import annotations

import struct
from array import array

import xxhash

FIRST_SLOTS = 1024
MASK = (1 << 64) - 1


def id_key(text: str) -> int:
    """The key of a conversation id or a custom_id, without 0."""
    return xxhash.xxh3_128_intdigest(text.encode("utf-8", "surrogatepass")) or 1


def request_key(line: int, turn: int) -> int:
    """The key of one request: its 1-based input line and its turn (0: the line as a whole)."""
    return xxhash.xxh3_128_intdigest(struct.pack("<qq", line, turn)) or 1


class KeyTable:
    """Distinct 128-bit keys, each with an integer where with_values is set."""

    def __init__(self, with_values: bool = False) -> None:
        self._with_values = with_values
        self._allocate(FIRST_SLOTS)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: int) -> bool:
        return self._occupied(self._slot_of(key))

    @property
    def num_bytes(self) -> int:
        """Bytes that the arrays take."""
        return sum(len(part) * part.itemsize for part in (self._high, self._low, self._values))

    def add(self, key: int, value: int = 0) -> bool:
        """Enter a key that is not 0; False, and nothing changes, where it is there already."""
        slot = self._slot_of(key)
        if self._occupied(slot):
            return False
        self._place(slot, key, value)
        if 3 * self._count >= 2 * len(self._high):
            self._grow()
        return True

    def get(self, key: int) -> int | None:
        """The value of a key, None where it is not there."""
        slot = self._slot_of(key)
        return self._values[slot] if self._with_values and self._occupied(slot) else None

    def _allocate(self, slots: int) -> None:
        self._count = 0
        self._high = array("Q", bytes(8 * slots))
        self._low = array("Q", bytes(8 * slots))
        self._values = array("q", bytes(8 * slots if self._with_values else 0))

    def _occupied(self, slot: int) -> bool:
        return bool(self._high[slot] or self._low[slot])

    def _slot_of(self, key: int) -> int:
        """The slot that holds the key, or the free one where it would go."""
        high, low = key >> 64, key & MASK
        slots = len(self._high)
        slot = low % slots
        while self._occupied(slot) and not (self._low[slot] == low and self._high[slot] == high):
            slot = slot + 1 if slot + 1 < slots else 0
        return slot

    def _place(self, slot: int, key: int, value: int) -> None:
        self._high[slot], self._low[slot] = key >> 64, key & MASK
        if self._with_values:
            self._values[slot] = value
        self._count += 1

    def _grow(self) -> None:
        high, low, values = self._high, self._low, self._values
        self._allocate(len(high) * 3 // 2)
        for slot in range(len(high)):
            if high[slot] or low[slot]:
                key = high[slot] << 64 | low[slot]
                self._place(self._slot_of(key), key, values[slot] if self._with_values else 0)
