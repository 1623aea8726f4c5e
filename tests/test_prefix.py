"""The grid and the prefix keys."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from apcbatch.prefix import PrefixHasher, as_token_array, boundaries_in, common_length, last_boundary, prefix_key
from tests.effort import table

FINGERPRINT = b"model"
GOLDEN_KEY = "f1101cb39cfecd17"  # of (5, 0, 2^31 - 1) under it, the first 8 bytes


@table("block_size", [1, 16, 528, 2048])
def test_boundaries(block_size):
    """A boundary missed at either end of a pass, or 0 taken for one."""
    for begin, end in [
        (0, 0), (0, 1), (0, block_size), (block_size, block_size), (block_size, 2 * block_size),
        (block_size - 1, block_size), (3, 5000), (block_size + 1, 2 * block_size - 1),
    ]:  # fmt: skip
        expected = [p for p in range(1, end + 1) if p % block_size == 0 and p > begin]
        assert list(boundaries_in(begin, end, block_size)) == expected
        assert last_boundary(end, block_size) == max([0, *(p for p in range(end + 1) if p % block_size == 0)])


def test_key_is_sha256_of_the_bytes():
    """A key whose definition drifts, so that stores written before no longer hit."""
    tokens = [5, 0, 2**31 - 1, 17]
    expected = hashlib.sha256(FINGERPRINT + np.array(tokens[:3], "<i4").tobytes()).digest()
    assert prefix_key(FINGERPRINT, tokens, 3) == expected
    assert expected.hex()[:16] == GOLDEN_KEY


def test_key_depends_on_everything_before_the_position_and_nothing_after():
    """Two different prefixes, models or positions under one key; one prefix under two."""
    generator = random.Random(1)
    tokens = [generator.randrange(50_000) for _ in range(300)]
    keys = [prefix_key(FINGERPRINT, tokens, p) for p in range(301)]
    assert len(set(keys)) == 301
    for changed in (0, 57, 299):
        other = [*tokens[:changed], tokens[changed] + 1, *tokens[changed + 1 :]]
        for p in (changed, changed + 1, 300):
            assert (prefix_key(FINGERPRINT, other, p) == keys[p]) == (p <= changed)
    assert prefix_key(b"another", tokens, 300) != keys[300]
    assert prefix_key(FINGERPRINT, tokens[:200], 200) == keys[200]


def test_keys_do_not_depend_on_the_grid():
    """A hit lost because the same prefix was stored under another block size."""
    tokens = as_token_array([3 * i % 1000 for i in range(2100)])
    truth = dict(PrefixHasher(FINGERPRINT, tokens).keys_at(range(1, 2101)))
    for block_size in (1, 16, 64, 528, 2048):
        positions = boundaries_in(0, 2100, block_size)
        hasher = PrefixHasher(FINGERPRINT, tokens)
        assert dict(hasher.keys_at(positions)) == {p: truth[p] for p in positions}


def test_one_hasher_goes_forward_only():
    """A key taken at a position that was already hashed over, or beyond the tokens."""
    hasher = PrefixHasher(FINGERPRINT, as_token_array(range(10)))
    first = hasher.key_at(4)
    assert hasher.key_at(4) == first
    assert hasher.key_at(10) == prefix_key(FINGERPRINT, range(10), 10)
    hasher = PrefixHasher(FINGERPRINT, as_token_array(range(10)))
    hasher.key_at(4)
    with pytest.raises(ValueError, match="expected a position from 4 to 10, got 3"):
        hasher.key_at(3)
    with pytest.raises(ValueError, match="expected a position from 4 to 10, got 11"):
        hasher.key_at(11)


@table("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint16)])
def test_token_arrays(kind):
    """A key that depends on how the ids were held; an empty prompt, which numpy makes a row of float64, keeps that
    type."""
    assert as_token_array(kind([])[:0]).dtype == np.int32 and as_token_array([]).shape == (0,)
    assert prefix_key(FINGERPRINT, kind([1, 2, 65_535]), 3) == prefix_key(FINGERPRINT, [1, 2, 65_535], 3)
    assert prefix_key(FINGERPRINT, np.arange(10)[::3], 4) == prefix_key(FINGERPRINT, [0, 3, 6, 9], 4)


@table("ids, error", [
    *((ids, OverflowError) for ids in ([-1], [2**31], [0, 2**40])),
    *((ids, TypeError) for ids in (1, [[1, 2]], [1.5], [1.0], [True], ["1"])),
])  # fmt: skip
def test_what_is_no_row_of_token_ids_is_refused(ids, error):
    """Fault: an id that wraps around to another token's or is cut to an integer, or a matrix that is hashed as its rows
    one after the other."""
    with pytest.raises(error, match="token ids must be one row of integers" if error is TypeError else "."):
        as_token_array(ids)


@table("a, b, length", [
    ([], [1], 0), ([1], [2], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 2], 2), ([2, 1], [3, 1], 0),
])  # fmt: skip
def test_common_length(a, b, length):
    """Fault: a prefix that is one token too long or too short, or ends with the last difference."""
    assert common_length(as_token_array(a), as_token_array(b)) == common_length(as_token_array(b), as_token_array(a))
    assert common_length(as_token_array(a), as_token_array(b)) == length
