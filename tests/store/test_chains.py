"""Chains of snapshots: what a descendant brings with it, and what a missing link costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from apcbatch.store import Store
from tests.store.conftest import FINGERPRINT, arrays_of, assert_is, key_of, path_of, put_chain


def test_a_chain_brings_the_kv_of_every_ancestor(store: Store) -> None:
    """A hybrid's KV is spread over its ancestors; one missing piece would be attention over garbage."""
    keys = put_chain(store, "a", 9)
    store.flush()
    chain = store.get_chain(keys[6], FINGERPRINT)
    assert chain.miss is None
    assert [link.position for link in chain.links] == [16 * (i + 1) for i in range(7)]
    for key, link in zip(keys, chain.links, strict=False):
        assert_is(link, key)
    assert [set(link.arrays) for link in chain.links] == [{"kv"}] * 6 + [{"ssm", "conv", "kv"}]


def test_a_chain_stops_at_what_the_caller_holds(store: Store) -> None:
    """What is in RAM must not be read from disk again."""
    keys = put_chain(store, "a", 9)
    store.flush()
    chain = store.get_chain(keys[6], FINGERPRINT, held={keys[2], keys[4]})
    assert [link.key for link in chain.links] == keys[5:7]
    assert chain.links[0].parent == keys[4]


def test_a_chain_without_kv_is_one_snapshot(store: Store, folder: Path) -> None:
    """A pure Mamba state stands alone; a lost ancestor must not make it unusable."""
    other = b"a mamba"
    a, b = key_of("m", 16), key_of("m", 32)
    store.put(a, 16, None, other, arrays_of(a, chained=False))
    store.put(b, 32, (a, 16), other, arrays_of(b, chained=False))
    store.flush()
    path_of(folder, a).unlink()
    chain = store.get_chain(b, other)
    assert [link.key for link in chain.links] == [b]


def test_a_chain_brings_every_tensor_of_tokens(store: Store, folder: Path, warnings: list[str]) -> None:
    """A model may keep more for each token than `kv`; a link without one of them would leave a gap in it."""
    latent, other = b"a latent model", b"another model"
    a, b, c = (key_of("l", position) for position in (16, 32, 48))
    tokens = {"kv_latent": np.ones((1, 16, 4), np.uint16), "kv_rope": np.ones((1, 16, 2), np.uint16)}
    for number, (key, parent) in enumerate(((a, None), (b, (a, 16)), (c, (b, 32)))):
        held = {name: array + number for name, array in tokens.items()}
        assert store.put(key, 16 * number + 16, parent, latent, {"ssm": np.zeros((1, 2), np.float32), **held})
    store.flush()
    links = store.get_chain(c, latent).links
    assert [set(link.arrays) for link in links] == [set(tokens)] * 2 + [{"ssm", *tokens}]
    assert [int(link.arrays["kv_rope"][0, 0, 0]) for link in links] == [1, 2, 3]
    assert store.put(key_of("l", 80), 80, (key_of("l", 64), 64), latent, tokens)
    store.flush()
    assert store.counters.skipped_stranded == 1, "it could never be used"
    path_of(folder, a).unlink()
    assert (store.get_chain(c, latent).miss, warnings) == ("stranded", [])
    first, second = key_of("m", 16), key_of("m", 32)
    store.put(first, 16, None, other, {"kv_latent": tokens["kv_latent"]})
    store.put(second, 32, (first, 16), other, tokens)
    store.flush()
    assert store.get_chain(second, other).miss == "stranded"
    assert "its parent has no kv_rope" in warnings[0]


def test_a_missing_snapshot_is_told_from_a_stranded_one(store: Store, folder: Path, warnings: list[str]) -> None:
    """`run` prints why a request got less than it could; and the caller must not try every link of a broken
    chain."""
    keys = put_chain(store, "a", 9)
    store.flush()
    path_of(folder, keys[3]).unlink()
    assert store.get_chain(key_of("b", 16), FINGERPRINT).miss == "missing"
    chain = store.get_chain(keys[8], FINGERPRINT)
    assert (chain.miss, chain.stranded_at, chain.links) == ("stranded", 64, ())
    assert store.get_chain(keys[2], FINGERPRINT).miss is None
    assert warnings == []
    assert store.put(keys[3], 64, (keys[2], 48), FINGERPRINT, arrays_of(keys[3]))
    store.flush()
    assert len(store.get_chain(keys[8], FINGERPRINT).links) == 9, "the chain is whole again"
