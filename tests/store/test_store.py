"""What a caller of the store can rely on while nothing fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apcbatch.layout import TensorLayout
from apcbatch.store import Store, StoreCounters
from tests.store.conftest import (
    BLOCK,
    FINGERPRINT,
    LAYOUT,
    arrays_of,
    assert_is,
    key_of,
    num_bytes_in,
    object_files,
    put,
    put_chain,
)


def test_what_was_put_is_read_after_flush_and_after_reopening(folder: Path, warnings: list[str]) -> None:
    """The store survives its process: that is what it is for."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 5)
        store.flush()
        assert store.present(keys) == set(keys)
        assert_is(store.get(keys[2], FINGERPRINT), keys[2])
    with Store.open(folder, warn=warnings.append) as store:
        assert store.present([*keys, key_of("b", 16)]) == set(keys)
        snapshot = store.get(keys[4], FINGERPRINT)
        assert_is(snapshot, keys[4])
        assert (snapshot.position, snapshot.parent, snapshot.parent_position) == (80, keys[3], 64)
    assert warnings == []


def test_after_close_nothing_raises(folder: Path, warnings: list[str]) -> None:
    store = Store.open(folder, warn=warnings.append)
    store.close()
    store.close()
    key = key_of("a", 16)
    assert not store.put(key, 16, None, FINGERPRINT, arrays_of(key))
    assert store.present([key]) == set() and store.get(key, FINGERPRINT) is None
    store.touch(key)
    store.flush()


def test_another_fingerprint_never_hits(store: Store, warnings: list[str]) -> None:
    """Other weights under the same path: a snapshot of them would be a wrong answer."""
    key = put(store, "a")
    store.flush()
    assert store.get(key, b"another model") is None
    assert len(warnings) == 1 and "another fingerprint" in warnings[0]


@pytest.mark.parametrize(
    "layout",
    [
        {**LAYOUT, "ssm": TensorLayout("F16", (2, 4, 3))},
        {**LAYOUT, "ssm": TensorLayout("F32", (2, 3, 4))},
        {"ssm": LAYOUT["ssm"], "conv": LAYOUT["conv"]},
    ],
    ids=["wrong dtype", "wrong shape", "surplus tensor"],
)
def test_a_snapshot_of_another_layout_is_a_miss_and_goes(
    folder: Path, warnings: list[str], layout: dict[str, TensorLayout]
) -> None:
    """It could only come from a fault in writing; handed out, it would be read beyond its end."""
    key = key_of("a", 16)
    with Store.open(folder, warn=warnings.append) as store:
        store.put(key, 16, None, FINGERPRINT, arrays_of(key))
    with Store.open(folder, warn=warnings.append) as store:
        store.register(FINGERPRINT, "test model", layout)
        assert store.present([key]) == {key}
        assert store.get(key, FINGERPRINT) is None
        assert store.present([key]) == set()
        store.flush()
    assert object_files(folder) == []
    assert len(warnings) == 1 and "the model's snapshots hold" in warnings[0]


@pytest.mark.parametrize("fault", ["layout", "dtype", "position", "key"])
def test_a_fault_of_the_caller_raises(store: Store, fault: str) -> None:
    """Silently dropped snapshots would look like a slow disk for ever."""
    key = key_of("a", 16)
    arrays = arrays_of(key)
    position, parent = 16, None
    if fault == "layout":
        arrays["ssm"] = arrays["ssm"][:1]
    elif fault == "dtype":
        arrays["ssm"] = arrays["ssm"].astype(np.float64)
    elif fault == "position":
        position, parent = 16, (key_of("a", 32), 32)
    else:
        key = key[:31]
    with pytest.raises(ValueError, match="."):
        store.put(key, position, parent, FINGERPRINT, arrays)


def test_many_keys_are_looked_up_at_once(store: Store) -> None:
    """A block size of 1 asks for thousands of keys; they do not fit into one query of SQLite."""
    keys = put_chain(store, "a", 700)
    store.flush()
    asked = [key_of("nobody", i) for i in range(2000)] + keys + keys
    assert store.present(asked) == set(keys)
    assert store.present([]) == set()


def test_keys_that_share_their_first_bytes_cost_a_snapshot_and_never_an_answer(store: Store) -> None:
    """A row's id is the first 8 bytes of its key."""
    a = key_of("a", 16)
    b = a[:8] + key_of("b", 16)[8:]
    done: list[bool] = []
    store.put(a, 16, None, FINGERPRINT, arrays_of(a))
    store.put(b, 16, None, FINGERPRINT, arrays_of(b), lambda _, ok: done.append(ok))
    store.flush()
    assert done == [False]
    assert store.present([a, b]) == {a}
    assert store.get(b, FINGERPRINT) is None
    assert_is(store.get(a, FINGERPRINT), a)


def test_counters_and_stats(store: Store, folder: Path) -> None:
    """The summary of a run is made from these."""
    keys = put_chain(store, "a", 4)
    store.flush()
    store.get(keys[0], FINGERPRINT)
    store.touch(keys[0])
    store.flush()
    num_bytes = num_bytes_in(folder)
    read = sum(array.nbytes for array in arrays_of(keys[0]).values())
    assert store.counters == StoreCounters(written=4, bytes_written=num_bytes, read=1, bytes_read=read)
    stats = store.stats()
    assert (stats.entries, stats.num_bytes, stats.num_stranded) == (4, num_bytes, 0)
    (model,) = stats.models
    assert (model.name, model.fingerprint, model.entries) == ("test model", FINGERPRINT.hex(), 4)
    assert (model.num_bytes, model.longest_position, model.uses) == (num_bytes, 4 * BLOCK, 1)


def test_a_model_gets_its_name_later(folder: Path, warnings: list[str]) -> None:
    """A rebuilt index knows no names; the next run tells it."""
    for name in (None, "later"):
        with Store.open(folder, warn=warnings.append) as store:
            if name:
                store.register(FINGERPRINT, name)
            put(store, name)
            store.flush()
            assert [model.name for model in store.stats().models] == [name or ""]


def test_memory_of_an_answer_is_its_own(store: Store) -> None:
    """The caller may write into what it got; the next reader must not see that."""
    key = put(store, "a")
    store.flush()
    store.get(key, FINGERPRINT).arrays["ssm"][:] = 0
    assert_is(store.get(key, FINGERPRINT), key)


def test_a_snapshot_is_read_into_the_memory_that_was_given(store: Store) -> None:
    """A restore that copies every state once more; an array of another size written beyond its end."""
    key = put_chain(store, "a", 1)[0]
    store.flush()
    given = {name: np.full_like(array, 7) for name, array in arrays_of(key).items()}
    small = next(iter(given))
    given[small] = given[small].reshape(-1)[:1].copy()
    snapshot = store.get(key, FINGERPRINT, into=given)
    assert_is(snapshot, key)
    for name, array in given.items():
        assert np.shares_memory(snapshot.arrays[name], array) == (name != small)
    assert given[small].tolist() == [7]
