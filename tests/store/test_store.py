"""What a caller of the store can rely on while nothing fails."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from apcbatch.errors import UsageError
from apcbatch.store import Store, StoreCounters, TensorLayout
from apcbatch.store.format import FORMAT_VERSION
from tests.store.conftest import (
    BLOCK,
    FINGERPRINT,
    LAYOUT,
    arrays_of,
    assert_is,
    key_of,
    object_files,
    path_of,
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


def test_close_drains_the_queue(folder: Path, warnings: list[str]) -> None:
    """A job that ends must not lose what it has just computed."""
    with Store.open(folder, warn=warnings.append) as store:
        put_chain(store, "a", 300)
    assert len(object_files(folder)) == 300


def test_close_without_draining_calls_everybody_back(folder: Path, warnings: list[str]) -> None:
    """Ctrl-C twice: nobody waits for the disk, and no caller keeps memory for a call that never comes."""
    done: list[tuple[bytes, bool]] = []
    store = Store.open(folder, warn=warnings.append)
    keys = [key_of("a", i) for i in range(200)]
    for i, key in enumerate(keys):
        assert store.put(
            key, i + 1, None, FINGERPRINT, arrays_of(key), lambda key, ok: done.append((key, ok))
        )
    store.close(drain=False)
    assert sorted(key for key, _ in done) == sorted(keys)
    assert len(object_files(folder)) == sum(ok for _, ok in done)


def test_after_close_nothing_raises(folder: Path, warnings: list[str]) -> None:
    store = Store.open(folder, warn=warnings.append)
    store.close()
    store.close()
    key = key_of("a", 16)
    assert not store.put(key, 16, None, FINGERPRINT, arrays_of(key))
    assert store.present([key]) == set() and store.get(key, FINGERPRINT) is None
    store.touch(key)
    store.flush()


def test_on_done_comes_from_the_store_after_the_snapshot_is_visible(store: Store) -> None:
    """The engine frees a slot on that call; an earlier one would let it overwrite bytes that are still being
    read."""
    seen: list[tuple[bool, bool, str]] = []
    key = key_of("a", 16)
    store.put(
        key,
        16,
        None,
        FINGERPRINT,
        arrays_of(key),
        lambda key, ok: seen.append((ok, bool(store.present([key])), threading.current_thread().name)),
    )
    store.flush()
    assert seen == [(True, True, "apcbatch-store")]


def test_a_duplicate_is_not_written_again(store: Store, folder: Path) -> None:
    """Thousands of requests share a prefix; each would write it."""
    key = key_of("a", 16)
    done: list[bool] = []
    store.put(key, 16, None, FINGERPRINT, arrays_of(key))
    store.flush()
    inode = path_of(folder, key).stat().st_ino
    assert store.put(key, 16, None, FINGERPRINT, arrays_of(key), lambda _, ok: done.append(ok))
    store.flush()
    assert path_of(folder, key).stat().st_ino == inode
    assert done == [True]
    assert (store.counters.written, store.counters.duplicates) == (1, 1)


def test_a_snapshot_on_its_way_is_not_taken_twice(store: Store) -> None:
    key = key_of("a", 16)
    answers = [store.put(key, 16, None, FINGERPRINT, arrays_of(key)) for _ in range(3)]
    store.flush()
    assert answers == [True, False, False]
    assert (store.counters.written, store.counters.duplicates) == (1, 2)


def test_a_full_queue_refuses_and_counts(folder: Path, warnings: list[str]) -> None:
    """A slow disk must never hold up the batch: put returns, the snapshot is skipped, the caller is told."""
    release = threading.Event()
    with Store.open(folder, warn=warnings.append, queue_snapshots=3) as store:
        first = key_of("first", 16)
        store.put(first, 16, None, FINGERPRINT, arrays_of(first), lambda *_: release.wait())
        taken = [
            store.put(key_of("a", i), i + 1, None, FINGERPRINT, arrays_of(key_of("a", i))) for i in range(6)
        ]
        assert taken == [True, True, False, False, False, False]
        assert store.counters.skipped_full_queue == 4
        release.set()
    assert len(object_files(folder)) == 3


def test_the_queue_is_bounded_in_bytes_but_takes_one_of_any_size(folder: Path, warnings: list[str]) -> None:
    """A snapshot larger than the whole queue would otherwise never be stored."""
    release = threading.Event()
    with Store.open(folder, warn=warnings.append, queue_bytes=1000) as store:
        large, small = key_of("large", 16), key_of("small", 16)
        assert store.put(large, 16, None, FINGERPRINT, arrays_of(large, scale=500), lambda *_: release.wait())
        assert not store.put(small, 16, None, FINGERPRINT, arrays_of(small))
        release.set()
        store.flush()
        assert store.put(small, 16, None, FINGERPRINT, arrays_of(small))


def test_flush_is_exact(store: Store) -> None:
    """What was put before flush is visible after it, however the work falls into batches."""
    for round_number in range(20):
        keys = put_chain(store, round_number, 7)
        store.flush()
        assert store.present(keys) == set(keys)


def test_flush_waits_for_the_batch_at_hand(store: Store) -> None:
    """An empty queue does not mean that its last snapshot is done."""
    entered, release = threading.Event(), threading.Event()
    key = key_of("a", 16)

    def hold(key: bytes, ok: bool) -> None:
        entered.set()
        release.wait()

    store.put(key, 16, None, FINGERPRINT, arrays_of(key), hold)
    entered.wait()
    flushing = threading.Thread(target=store.flush)
    flushing.start()
    flushing.join(timeout=0.1)
    returned_early = not flushing.is_alive()
    release.set()
    flushing.join()
    assert not returned_early


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


def test_a_missing_snapshot_is_told_from_a_stranded_one(
    store: Store, folder: Path, warnings: list[str]
) -> None:
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


def test_a_stranded_chain_heals_when_the_link_is_stored_again(store: Store, folder: Path) -> None:
    """After one bad file the rest of the conversation must not be lost for ever."""
    keys = put_chain(store, "a", 9)
    store.flush()
    path_of(folder, keys[3]).unlink()
    assert store.get_chain(keys[8], FINGERPRINT).miss == "stranded"
    assert store.put(keys[3], 64, (keys[2], 48), FINGERPRINT, arrays_of(keys[3]))
    store.flush()
    assert len(store.get_chain(keys[8], FINGERPRINT).links) == 9


def test_a_child_without_its_parent_is_not_stored(store: Store) -> None:
    """It could never be used, and would hold room."""
    done: list[bool] = []
    key = key_of("a", 32)
    store.put(key, 32, (key_of("a", 16), 16), FINGERPRINT, arrays_of(key), lambda _, ok: done.append(ok))
    store.flush()
    assert done == [False]
    assert store.counters.skipped_stranded == 1 and store.stats().entries == 0


def test_another_fingerprint_never_hits(store: Store, warnings: list[str]) -> None:
    """Other weights under the same path: a snapshot of them would be a wrong answer."""
    key = key_of("a", 16)
    store.put(key, 16, None, FINGERPRINT, arrays_of(key))
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
    num_bytes = sum(path.stat().st_size for path in object_files(folder))
    read = sum(array.nbytes for array in arrays_of(keys[0]).values())
    assert store.counters == StoreCounters(written=4, bytes_written=num_bytes, read=1, bytes_read=read)
    stats = store.stats()
    assert (stats.entries, stats.num_bytes, stats.is_read_only, stats.num_stranded) == (
        4,
        num_bytes,
        False,
        0,
    )
    (model,) = stats.models
    assert (model.name, model.fingerprint, model.entries) == ("test model", FINGERPRINT.hex(), 4)
    assert (model.num_bytes, model.longest_position, model.uses) == (num_bytes, 4 * BLOCK, 1)


def test_a_model_gets_its_name_later(folder: Path, warnings: list[str]) -> None:
    """A rebuilt index knows no names; the next run tells it."""
    for name in (None, "later"):
        with Store.open(folder, warn=warnings.append) as store:
            if name:
                store.register(FINGERPRINT, name)
            key = key_of(name, 16)
            store.put(key, 16, None, FINGERPRINT, arrays_of(key))
            store.flush()
            assert [model.name for model in store.stats().models] == [name or ""]


def test_memory_of_an_answer_is_its_own(store: Store) -> None:
    """The caller may write into what it got; the next reader must not see that."""
    key = key_of("a", 16)
    store.put(key, 16, None, FINGERPRINT, arrays_of(key))
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


def test_a_newer_store_is_refused(folder: Path, warnings: list[str]) -> None:
    """An old program must not evict or misread what a new one has written."""
    Store.open(folder, warn=warnings.append).close()
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute("UPDATE meta SET value = ?", (FORMAT_VERSION + 1,))
    db.close()
    for read_only in (False, True):
        with pytest.raises(UsageError, match=f"store format {FORMAT_VERSION + 1}.*newer apcbatch"):
            Store.open(folder, warn=warnings.append, read_only=read_only)


def test_another_programs_database_is_refused_and_left_alone(folder: Path, warnings: list[str]) -> None:
    folder.mkdir()
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute("CREATE TABLE photos (name TEXT)")
    db.close()
    before = (folder / "index.sqlite").read_bytes()
    with pytest.raises(UsageError, match="not the index of a snapshot store"):
        Store.open(folder, warn=warnings.append)
    assert (folder / "index.sqlite").read_bytes() == before


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, warnings: list[str]) -> None:
    path = tmp_path / "store"
    path.write_text("hello")
    with pytest.raises(UsageError, match="not a folder"):
        Store.open(path, warn=warnings.append)


def test_reading_where_there_is_no_store_is_refused(folder: Path, warnings: list[str]) -> None:
    """`store stat` of a mistyped path must not make a new store there."""
    with pytest.raises(UsageError, match="there is no store"):
        Store.open(folder, warn=warnings.append, read_only=True)
    assert not folder.exists()
