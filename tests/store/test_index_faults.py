"""The index when it is damaged, locked or half made: it is made anew, and no snapshot is lost with it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from apcbatch.store import Store
from apcbatch.store.database import IndexUnavailable
from apcbatch.store.index import Index
from apcbatch.store.snapshot_file import SnapshotFolder
from tests.store.conftest import (
    FINGERPRINT,
    arrays_of,
    assert_is,
    execute,
    key_of,
    num_bytes_in,
    object_files,
    path_of,
    put,
    put_chain,
)

INDEX_DAMAGES: dict[str, Callable[[Path], object]] = {
    "noise": lambda path: path.write_bytes(os.urandom(20000)),
    "noise after the first page": lambda path: path.write_bytes(path.read_bytes()[:4096] + os.urandom(60000)),
    "zeros in the middle": lambda path: path.write_bytes(path.read_bytes()[:8192] + bytes(8192)),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "text": lambda path: path.write_text("hello"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", INDEX_DAMAGES)
def test_a_damaged_index_is_made_anew_from_the_files(folder: Path, warnings: list[str], name: str) -> None:
    """The index is a convenience: what it knew is in the files, and 20 GB of them must not be lost with
    it."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 40)
    num_bytes = num_bytes_in(folder)
    INDEX_DAMAGES[name](folder / "index.sqlite")
    with Store.open(folder, warn=warnings.append) as store:
        assert store.present(keys) == set(keys)
        assert len(store.get_chain(keys[39], FINGERPRINT).links) == 40
        assert (store.stats().entries, store.stats().num_bytes) == (40, num_bytes)
        assert store.check().faults == []
    assert any("40 snapshots are in it" in line for line in warnings)
    with Store.open(folder, 3 * num_bytes // 4, warn=warnings.append) as store:
        put_chain(store, "b", 3)
        store.flush()
        assert store.present(keys) == set(keys[: len(store.present(keys))]), "an ancestor went before"


def test_an_index_damaged_in_the_middle_of_a_run(folder: Path, warnings: list[str]) -> None:
    """Nothing raises, one line or two say so, and the next run has a sound store."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 400)
        store.flush()
        execute(folder, "PRAGMA wal_checkpoint(TRUNCATE)")
        with open(folder / "index.sqlite", "r+b") as file:
            file.seek(4096)
            file.write(os.urandom(120_000))
        for i in range(3):
            store.present(keys)
            put(store, "b", i)
            store.flush()
    assert 1 <= len(warnings) <= 3
    with Store.open(folder, warn=warnings.append) as store:
        for key in keys:
            snapshot = store.get(key, FINGERPRINT)
            assert snapshot is None or assert_is(snapshot, key) is None
        assert len(store.present(keys)) == 400


def test_a_locked_index_costs_the_snapshots(folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that hangs with the write lock must not hang the run."""
    monkeypatch.setattr("apcbatch.store.database.BUSY_TIMEOUT_S", 0.05)
    done: list[bool] = []
    with Store.open(folder, warn=warnings.append) as store:
        other = sqlite3.connect(folder / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        key = put(store, "a", 16, done)
        store.flush()
        assert done == [False] and "locked" in warnings[0]
        other.execute("ROLLBACK")
        other.close()
        store.put(key, 16, None, FINGERPRINT, arrays_of(key), lambda _, ok: done.append(ok))
        store.flush()
        assert done == [False, True]


@pytest.mark.parametrize("number", [1, 2])
def test_a_transaction_that_fails_at_its_end(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The first makes room, the second publishes. A file whose row was rolled back would never be counted; a
    row whose file was evicted by a transaction that did not come to be is found and dropped."""
    transaction, count = Index.transaction, 0

    @contextmanager
    def failing(self: Index) -> Iterator[None]:
        nonlocal count
        with transaction(self):
            yield
            count += 1
            if count == number:
                raise IndexUnavailable("database or disk is full")

    done: list[bool] = []
    with Store.open(folder, 6_000, warn=warnings.append) as store:
        old = put_chain(store, "old", 5)
        store.flush()
        monkeypatch.setattr(Index, "transaction", failing)
        key = key_of("new", 16)
        for _ in range(2):
            store.put(key, 16, None, FINGERPRINT, arrays_of(key), lambda _, ok: done.append(ok))
            store.flush()
            assert path_of(folder, key).exists() == done[-1]
        assert done == [False, True]
        for old_key in old:
            store.get(old_key, FINGERPRINT)
        store.flush()
        files = {path.stem for path in object_files(folder)}
        assert {key.hex() for key in store.present([*old, key])} == files
        assert list((folder / "tmp").glob("*.tmp")) == []
    assert len(warnings) == 1 and "disk is full" in warnings[0]


def test_a_rebuild_that_is_killed_is_done_again(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that is there but half filled would hide the other half for ever, and not count it."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 10)
    (folder / "index.sqlite").unlink()
    header, count = SnapshotFolder.header, 0

    def killed(self: SnapshotFolder, key: bytes) -> object:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return header(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotFolder, "header", killed)
        with pytest.raises(KeyboardInterrupt):
            Store.open(folder, warn=warnings.append)
    with Store.open(folder, warn=warnings.append) as store:
        assert store.present(keys) == set(keys)
