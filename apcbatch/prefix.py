"""Positions and keys of prefixes: the block grid, the pieces a pass is cut into, and the prefix key.

Must not know: tensors, states, files. Every function is pure.
Invariants: cuts are absolute (they depend on positions counted from token 0, never on where a chunk began); a key is a
SHA-256 over the fingerprint and the token ids before the position, so it does not depend on the grid either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]


def as_token_array(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> TokenArray:
    """Token ids as a contiguous int32 array; raises OverflowError for ids outside int32, and TypeError for anything
    but one row of integers: 1.5 is not token 1."""
    array = np.asarray(token_ids)
    if array.ndim != 1 or array.size and array.dtype.kind not in "iu":
        raise TypeError(f"token ids must be one row of integers, got {array.ndim} dimensions of {array.dtype}")
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise OverflowError("token ids must lie in 0 .. 2147483647")
    return np.ascontiguousarray(array, dtype=np.int32)


def last_boundary(position: int, block_size: int) -> int:
    """The largest multiple of block_size that is at most position."""
    return position - position % block_size


def boundaries_in(begin: int, end: int, block_size: int) -> range:
    """The boundaries b with begin < b <= end, ascending."""
    return range(last_boundary(begin, block_size) + block_size, end + 1, block_size)


@dataclass(frozen=True)
class Pieces:
    """A packed batch cut on the absolute grid.

    ends: cumulative token offset after each piece, with a leading 0 (pieces + 1 entries). owner: the sequence of each
    piece. last: the index of each sequence's last piece. A piece that ends on the grid completes a block.
    """

    ends: list[int]
    owner: list[int]
    last: list[int]


def cut_pieces(computed: Sequence[int], new: Sequence[int], block_size: int) -> Pieces:
    """Cut each sequence's new tokens, which follow `computed` ones, at the multiples of block_size.

    The first piece completes the running block: 1866 computed and 1100 new at 2048 gives pieces of 182 and 918.
    """
    ends, owner, last = [0], [], []
    for sequence, (begin, count) in enumerate(zip(computed, new, strict=True)):
        stops = [b for b in boundaries_in(begin, begin + count, block_size) if b < begin + count]
        for start, stop in zip([begin, *stops], [*stops, begin + count], strict=True):
            ends.append(ends[-1] + stop - start)
            owner.append(sequence)
        last.append(len(owner) - 1)
    return Pieces(ends, owner, last)


class PrefixHasher:
    """Prefix keys of one token sequence at ascending positions, hashing every token once."""

    def __init__(self, fingerprint: bytes, token_ids: TokenArray) -> None:
        self._state = hashlib.sha256(fingerprint)
        self._bytes = np.ascontiguousarray(token_ids, dtype="<i4").data.cast("B")
        self._position = 0

    def key_at(self, position: int) -> bytes:
        """The key of the first `position` tokens; positions must not descend."""
        if position < self._position or 4 * position > len(self._bytes):
            raise ValueError(
                f"expected a position from {self._position} to {len(self._bytes) // 4}, got {position}: "
                "keys of one hasher are taken in ascending order"
            )
        self._state.update(self._bytes[4 * self._position : 4 * position])
        self._position = position
        return self._state.copy().digest()

    def keys_at(self, positions: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """(position, key) for each of the ascending positions."""
        for position in positions:
            yield position, self.key_at(position)


def prefix_key(
    fingerprint: bytes, token_ids: Sequence[int] | npt.NDArray[np.integer], position: int
) -> bytes:
    """SHA-256 over the fingerprint and the first `position` token ids as little-endian int32 (32 bytes)."""
    return PrefixHasher(fingerprint, as_token_array(token_ids)[:position]).key_at(position)
