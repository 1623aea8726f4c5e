"""The writer behind put: what close, flush and a full queue promise, and what is not written twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apcbatch.store import BadSnapshot, Store, writer
from apcbatch.store.snapshot_file import SnapshotFolder
from tests.effort import table
from tests.store.conftest import (
    FINGERPRINT,
    LAYOUT,
    arrays_of,
    assert_is,
    execute,
    key_of,
    num_bytes_in,
    object_files,
    path_of,
    put_chain,
)


def test_close_drains_the_queue(folder: Path, warnings: list[str]) -> None:
    """A job that ends must not lose what it has just computed."""
    with Store.open(folder, warn=warnings.append) as store:
        put_chain(store, "a", 300)
    assert len(object_files(folder)) == 300


def test_close_without_draining_calls_everybody_back(folder: Path, warnings: list[str]) -> None:
    """Ctrl-C twice: no thread waits for the disk, and no caller keeps memory for a call that never comes."""
    done: list[tuple[bytes, bool]] = []
    store = Store.open(folder, warn=warnings.append)
    keys = [key_of("a", i) for i in range(200)]
    for i, key in enumerate(keys):
        assert store.put(key, i + 1, None, FINGERPRINT, arrays_of(key), lambda key, ok: done.append((key, ok)))
    store.close(drain=False)
    assert sorted(key for key, _ in done) == sorted(keys)
    assert len(object_files(folder)) == sum(ok for _, ok in done)


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
    assert store.put(key, 16, None, FINGERPRINT, arrays_of(key), again=True)
    assert store.counters.skipped_full_queue == 0, "the queue was never full, so nothing is skipped no longer"


def test_a_full_queue_refuses_and_counts(folder: Path, warnings: list[str]) -> None:
    """A slow disk must never hold up the batch: put returns, the snapshot is skipped, the caller learns it. Offered
    again it waits for room, and counts as skipped no longer."""
    release = threading.Event()
    with Store.open(folder, warn=warnings.append, queue_snapshots=3) as store:
        first = key_of("first", 16)
        store.put(first, 16, None, FINGERPRINT, arrays_of(first), lambda *_: release.wait())
        taken = [store.put(key_of("a", i), i + 1, None, FINGERPRINT, arrays_of(key_of("a", i))) for i in range(6)]
        assert taken == [True, True, False, False, False, False]
        assert store.counters.skipped_full_queue == 4
        threading.Timer(0.05, release.set).start()
        for i in range(2, 6):
            assert store.put(key_of("a", i), i + 1, None, FINGERPRINT, arrays_of(key_of("a", i)), again=True)
            assert store.counters.skipped_full_queue == 5 - i, "it is not skipped any more"
    assert len(object_files(folder)) == 7


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


def test_a_callback_that_fails_does_not_leave_anybody_waiting(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: an error in the caller's own code, which ends the store's thread, hangs a flush, or a snapshot that is
    still queued is never called back."""
    seen: list[threading.ExceptHookArgs] = []
    done: list[object] = []
    hook, threading.excepthook = threading.excepthook, seen.append
    try:
        with Store.open(folder, warn=warnings.append) as store:
            key, queued = key_of("a", 16), key_of("queued", 16)

            def fail(*_: object) -> None:
                assert store.put(queued, 16, None, FINGERPRINT, arrays_of(queued), lambda *given: done.append(given))
                raise ZeroDivisionError

            beside = key_of("beside", 16)
            monkeypatch.setattr(writer, "LINGER_S", 1e4)  # both in one batch
            store.put(key, 16, None, FINGERPRINT, arrays_of(key), fail)
            store.put(beside, 16, None, FINGERPRINT, arrays_of(beside), lambda *given: done.append(given))
            store.flush()
            assert not store.put(key_of("b", 16), 16, None, FINGERPRINT, arrays_of(key))
    finally:
        threading.excepthook = hook
    assert [one.exc_type for one in seen] == [ZeroDivisionError] and done == [(beside, True), (queued, False)]


def test_the_first_of_several_errors_is_raised_when_all_are_called_back(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a callback's error hides the ones after it, or the cause of all is hidden by the last."""
    seen: list[threading.ExceptHookArgs] = []
    told: list[bytes] = []

    def fail(key: bytes, is_stored: bool) -> None:
        told.append(key)
        raise KeyError(key)

    monkeypatch.setattr(threading, "excepthook", seen.append)
    monkeypatch.setattr(writer, "LINGER_S", 1e4)  # all in one batch
    keys = [key_of(name, 16) for name in "abc"]
    with Store.open(folder, warn=warnings.append) as store:
        for key, on_done in zip(keys, (fail, None, fail), strict=True):
            store.put(key, 16, None, FINGERPRINT, arrays_of(key), on_done)
        store.flush()
    assert told == [keys[0], keys[2]] and [one.exc_value.args for one in seen] == [(keys[0],)]  # type: ignore[union-attr]


@table("changed, is_due", [
    ({}, False), ({"_is_closing": True}, True), ({"_num_flushing": 1}, True), ({"_queued_keys": range(63)}, False),
    ({"_queued_keys": range(64)}, True), ({"_queued_keys": range(7), "_queue_offers": 8}, False),
    ({"_queued_keys": range(8), "_queue_offers": 8}, True), ({"_num_bytes": 99}, False), ({"_num_bytes": 100}, True),
    ({"_num_bytes": 39, "_queue_bytes": 80}, False), ({"_num_bytes": 40, "_queue_bytes": 80}, True),
])  # fmt: skip
def test_when_a_batch_is_due(changed: dict[str, object], is_due: bool) -> None:
    """Fault: a queue that is half full waits for more, and refuses snapshots meanwhile; or each snapshot is a batch."""
    idle = {"_is_closing": False, "_num_flushing": 0, "_queued_keys": (), "_queue_offers": 1000,
            "_num_bytes": 0, "_batch_bytes": 100, "_queue_bytes": 1000}  # fmt: skip
    assert writer.Writer._is_batch_due(SimpleNamespace(**idle | changed)) == is_due  # type: ignore[arg-type]


def test_a_flush_waits_for_no_more_work(folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a flush that sits out the time in which a batch may grow, and batches that do not grow after one."""
    monkeypatch.setattr(writer, "LINGER_S", 1e4)
    with Store.open(folder, warn=warnings.append) as store:
        for name in "ab":
            put_chain(store, name, 2)
            store.flush()
        written = put_chain(store, "c", 1)
        time.sleep(0.5)
        assert store.present(written) == set(), "it waits for others"


@pytest.mark.parametrize("write_threads", [1, 4])
def test_arrays_are_fetched_when_they_are_written(write_threads: int, folder: Path, warnings: list[str]) -> None:
    """Catches arrays that are fetched for a snapshot which is there already, on the caller's thread, or released before
    the file is written; and a failure that costs more than its own snapshot."""
    keys = [key_of("a", i) for i in range(40)]
    fetched: list[tuple[bytes, str]] = []

    @contextmanager
    def fetch(key: bytes) -> Iterator[dict[str, np.ndarray]]:
        fetched.append((key, threading.current_thread().name))
        if key == keys[7]:
            raise OSError("the device has failed")
        arrays = arrays_of(key, chained=False)
        yield arrays
        for array in arrays.values():
            array.fill(0)  # as of a buffer that is used again

    layout = {name: one for name, one in LAYOUT.items() if name != "kv"}
    with Store.open(folder, warn=warnings.append, write_threads=write_threads) as store:
        with pytest.raises(ValueError, match="registered layout"):
            store.put(keys[0], 16, None, FINGERPRINT, partial(fetch, keys[0]))
        store.register(FINGERPRINT, "m", layout)
        for _ in range(2):
            for key in keys:
                assert store.put(key, 16, None, FINGERPRINT, partial(fetch, key))
            store.flush()
        assert store.present(keys) == set(keys) - {keys[7]}
        for key in set(keys) - {keys[7]}:
            assert_is(store.get(key, FINGERPRINT), key, chained=False)
        assert (store.counters.written, store.counters.failed, store.counters.duplicates) == (39, 2, 39)
        assert store.counters.bytes_written == num_bytes_in(folder)
    assert sorted(key for key, _ in fetched) == sorted([*keys, keys[7]])
    assert all(name.startswith("apcbatch-store") for _, name in fetched)
    assert len(warnings) == 1 and "the device has failed" in warnings[0]
    assert not list((folder / "tmp").glob("*.tmp"))


def test_what_is_given_up_is_never_fetched(folder: Path, warnings: list[str]) -> None:
    """Catches a device that is asked for snapshots after a run has ended in haste."""
    done: list[bool] = []
    store = Store.open(folder, warn=warnings.append, queue_bytes=1 << 30)
    store.register(FINGERPRINT, "m", {name: one for name, one in LAYOUT.items() if name != "kv"})
    release, fetched = threading.Event(), []

    @contextmanager
    def fetch(key: bytes) -> Iterator[dict[str, np.ndarray]]:
        fetched.append(key)
        release.wait()
        yield arrays_of(key, chained=False)

    for i in range(writer.MAX_BATCH_OFFERS + 20):
        key = key_of("a", i)
        assert store.put(key, 16, None, FINGERPRINT, partial(fetch, key), lambda _, ok: done.append(ok))
    while not fetched:
        time.sleep(0.001)
    threading.Timer(0.05, release.set).start()
    store.close(drain=False)
    assert len(fetched) == writer.MAX_BATCH_OFFERS == sum(done) and len(done) == writer.MAX_BATCH_OFFERS + 20


def test_a_use_that_comes_with_the_snapshot_itself_counts(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a snapshot that is used before it is on disk is taken for an unused one, and goes first."""
    used, unused = key_of("used", 16), key_of("unused", 16)
    monkeypatch.setattr(writer, "LINGER_S", 1e4)  # all in one batch
    for key in (used, unused):
        store.put(key, 16, None, FINGERPRINT, arrays_of(key))
    for _ in range(3):
        store.touch(used)
    store.flush()
    for key, uses in ((used, 3), (unused, 0)):
        assert execute(folder, "SELECT uses FROM snapshots WHERE key = ?", key) == [(uses,)]


@table(
    "error, is_kept, has_file",
    [(None, True, True), (FileNotFoundError(), False, True), (BadSnapshot("nonsense"), False, False),
     (OSError("the disk is away"), True, True)],
)  # fmt: skip
def test_a_suspect_is_removed_only_if_it_is_bad(
    error: Exception | None, is_kept: bool, has_file: bool, warnings: list[str]
) -> None:
    """A disk that fails for a moment must cost no snapshot, and a bad one must not stay in the index."""
    errors, read = [error, BadSnapshot("as it was read first")], SnapshotFolder.read

    def fails(*arguments: Any) -> Any:
        error = errors.pop()
        if error is not None:
            raise error
        return read(*arguments)

    with TemporaryDirectory() as folder, Store.open(folder, warn=warnings.append) as store:
        [key] = put_chain(store, "a", 1)
        store.flush()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SnapshotFolder, "read", fails)
            assert store.get(key, FINGERPRINT) is None
            store.flush()
        assert not errors and store.present([key]) == ({key} if error is None else set()), "hidden until it is settled"
        assert execute(Path(folder), "SELECT count(*) FROM snapshots") == [(is_kept,)]
        assert path_of(folder, key).exists() == has_file
