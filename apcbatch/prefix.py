"""Positions and keys of prefixes: the block grid, the common prefix of two sequences, and the prefix key.

Every function is pure.

Invariants:
- Boundaries are absolute: positions count from token 0, not from the beginning of a chunk.
- A key is a SHA-256 over the fingerprint and the token ids before the position, so it does not depend on the grid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
_LARGEST_ID = (1 << 31) - 1


def as_token_array(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> TokenArray:
    """Convert token ids to a contiguous int32 array.

    Raises OverflowError for ids outside 0 .. 2147483647, and TypeError for anything but a one-dimensional sequence of
    integers (1.5 is refused, not truncated).
    """
    array = np.asarray(token_ids)
    if array.ndim != 1 or array.size and array.dtype.kind not in "iu":
        raise TypeError(f"token ids must be one row of integers, got {array.ndim} dimensions of {array.dtype}")
    if array.size and (array.min() < 0 or (array.dtype != np.int32 and array.max() > _LARGEST_ID)):
        raise OverflowError("token ids must lie in 0 .. 2147483647")
    return np.ascontiguousarray(array, dtype=np.int32)


def checked_tokens(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> TokenArray:
    """Return an int32 array unchanged, without checking its ids; convert any other sequence by as_token_array."""
    is_checked = isinstance(token_ids, np.ndarray) and token_ids.dtype == np.int32
    return token_ids if is_checked else as_token_array(token_ids)  # type: ignore[return-value]


def last_boundary(position: int, block_size: int) -> int:
    """Return the largest multiple of block_size that is at most position."""
    return position - position % block_size


def boundaries_in(begin: int, end: int, block_size: int) -> range:
    """Return the boundaries b with begin < b <= end, ascending."""
    return range(last_boundary(begin, block_size) + block_size, end + 1, block_size)


def common_length(a: TokenArray, b: TokenArray) -> int:
    """Return the length of the longest common prefix of two arrays."""
    n = min(len(a), len(b))
    first = first_true(a[:n] != b[:n])
    return n if first is None else first


def first_true(mask: npt.NDArray[np.bool_]) -> int | None:
    """Return the index of the first True; None without one. It keeps the interpreter's lock, unlike argmax, any and
    max: where other threads wait for the lock, giving it away costs ten times as much."""
    index = mask.tobytes().find(1)
    return None if index < 0 else index


class PrefixHasher:
    """Computes prefix keys of one token sequence at ascending positions, and hashes every token once."""

    def __init__(self, fingerprint: bytes, token_ids: TokenArray) -> None:
        self._state = hashlib.sha256(fingerprint)
        self._bytes = np.ascontiguousarray(token_ids, dtype="<i4").data.cast("B")
        self._position = 0

    def key_at(self, position: int) -> bytes:
        """Return the key (32 bytes) of the first `position` tokens. Positions must not decrease between calls."""
        if position < self._position or 4 * position > len(self._bytes):
            raise ValueError(
                f"expected a position from {self._position} to {len(self._bytes) // 4}, got {position}: "
                "keys of one hasher are taken in ascending order"
            )
        self._state.update(self._bytes[4 * self._position : 4 * position])
        self._position = position
        return self._state.copy().digest()

    def keys_at(self, positions: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield (position, key) for each of the ascending positions."""
        for position in positions:
            yield position, self.key_at(position)


def prefix_key(fingerprint: bytes, token_ids: Sequence[int] | npt.NDArray[np.integer], position: int) -> bytes:
    """Return SHA-256 (32 bytes) over the fingerprint and the first `position` token ids as little-endian int32."""
    return PrefixHasher(fingerprint, as_token_array(token_ids)[:position]).key_at(position)
