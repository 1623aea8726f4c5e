"""Compact hash table of 96-bit keys, for used ids and answered requests.

Open addressing in flat arrays takes 25 to 32 bytes per key; a Python dict takes over 150. Among a billion keys, the
probability of any collision is about 1e-11.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator

import xxhash

from apcbatch.errors import RequestError

FIRST_SLOTS = 1024
LOW_BITS = 64
MASK = (1 << LOW_BITS) - 1
HASH_BITS = 128
KEY_BITS = 96


def id_key(text: str) -> int:
    """Return the key of a text, such as a custom_id; never 0."""
    return xxhash.xxh3_128_intdigest(text.encode("utf-8", "surrogatepass")) >> (HASH_BITS - KEY_BITS) or 1


class KeyTable:
    """Map from distinct 96-bit keys to 64-bit integers."""

    def __init__(self) -> None:
        self._allocate(FIRST_SLOTS)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: int) -> bool:
        return self._occupied(self._slot_of(key))

    @property
    def num_bytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(len(part) * part.itemsize for part in (self._high, self._low, self._values))

    def add(self, key: int, value: int) -> bool:
        """Insert a key (not 0) with its value, and return True. If the key is there already, change nothing and return
        False."""
        slot = self._slot_of(key)
        if self._occupied(slot):
            return False
        self._put(slot, key, value)
        if 5 * self._count >= 4 * len(self._high):
            self._grow()
        return True

    def get(self, key: int) -> int | None:
        """Return the value of a key; None if it is not there."""
        slot = self._slot_of(key)
        return self._values[slot] if self._occupied(slot) else None

    def set(self, key: int, value: int) -> None:
        """Change the value of a key that is there."""
        self._values[self._slot_of(key)] = value

    def values(self) -> Iterator[int]:
        """Iterate over the values of all keys, in no particular order."""
        return (value for slot, value in enumerate(self._values) if self._occupied(slot))

    def _allocate(self, slots: int) -> None:
        self._count = 0
        self._high = array("I", bytes(4 * slots))
        self._low = array("Q", bytes(8 * slots))
        self._values = array("q", bytes(8 * slots))

    def _occupied(self, slot: int) -> bool:
        return bool(self._high[slot] or self._low[slot])

    def _slot_of(self, key: int) -> int:
        """Return the slot that holds the key, or the free slot where it would go."""
        high, low = key >> LOW_BITS, key & MASK
        highs, lows, slots = self._high, self._low, len(self._high)
        slot = low % slots
        while (lows[slot] != low or highs[slot] != high) and (lows[slot] or highs[slot]):
            slot = slot + 1 if slot + 1 < slots else 0
        return slot

    def _put(self, slot: int, key: int, value: int) -> None:
        self._high[slot], self._low[slot], self._values[slot] = key >> LOW_BITS, key & MASK, value
        self._count += 1

    def _grow(self) -> None:
        high, low, values = self._high, self._low, self._values
        self._allocate(len(high) * 5 // 4)
        for slot in range(len(high)):
            if high[slot] or low[slot]:
                key = high[slot] << LOW_BITS | low[slot]
                self._put(self._slot_of(key), key, values[slot])


class UsedIds:
    """Set of the custom_ids seen so far, with the first line that used each."""

    def __init__(self) -> None:
        self._lines = KeyTable()

    def add(self, custom_id: str, line: int) -> RequestError | None:
        """Register the id of a request; return the error `duplicate_id` if it is there already."""
        key = id_key(custom_id)
        if self._lines.add(key, line):
            return None
        first = self._lines.get(key)
        return RequestError("duplicate_id", f"id {custom_id!r} was used by line {first}; expected each id once")


class EqualLines:
    """Counts of lines with equal content, regardless of the order of their keys."""

    def __init__(self) -> None:
        self._counts = KeyTable()

    def add(self, record: object, digest: str) -> tuple[str, int]:
        """Count a line. Return the digest of its content, and the number of equal lines before it. record: the parsed
        line; None if it cannot be parsed. digest: digest of its bytes, which is its content's if it is not parsed, or
        is nested too deeply for json.dumps."""
        try:
            content = digest if record is None else json.dumps(record, sort_keys=True, default=ascii)
        except RecursionError:
            content = digest
        key = id_key(content)
        count = self._counts.get(key) or 0
        if not self._counts.add(key, 1):
            self._counts.set(key, count + 1)
        return f"{key:024x}", count
