"""A disk that refuses, is read-only or vanishes costs the snapshots, says so in one line, and raises nothing."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from apcbatch import regular_files
from apcbatch.errors import UsageError
from apcbatch.store import Store, database, environment
from apcbatch.store.database import Database, IndexUnavailable, Values
from apcbatch.store.index import Index
from tests.store.conftest import FINGERPRINT, arrays_of, assert_is, key_of, object_files, put, put_chain
from tests.store.faults import CALLS, FaultyFiles, bad_sector, disk_full, read_only


def test_a_bad_sector_is_a_miss_and_the_file_stays(folder: Path, warnings: list[str]) -> None:
    """An error of the device says nothing about the snapshot; only a verified fault removes it."""
    files = FaultyFiles()
    with Store.open(folder, warn=warnings.append, files=files) as store:
        key = put_chain(store, "a", 1)[0]
        store.flush()
        files.fail = lambda call, path: bad_sector(path) if call == "open" else None
        assert store.get(key, FINGERPRINT) is None
        assert store.present([key]) == set()
        store.flush()
    assert len(object_files(folder)) == 1 and len(warnings) == 1


@pytest.mark.drawn(6)
@pytest.mark.parametrize("error", [disk_full, read_only, bad_sector], ids=["full", "read-only", "bad sector"])
@pytest.mark.parametrize("call", ["make_folders", "write", "rename", "unlink"])
def test_a_disk_that_refuses_costs_the_snapshots_and_no_more(
    folder: Path, warnings: list[str], call: str, error: Callable[[str], OSError]
) -> None:
    """At each call that changes the disk: nothing raises, everybody is called back, nothing
    half-written stays, and when the disk recovers so does the store."""
    files = FaultyFiles()
    done: list[bool] = []
    with Store.open(folder, 6000, warn=warnings.append, files=files) as store:
        old = put_chain(store, "old", 3)
        store.flush()
        files.fail = lambda name, path: error(path) if name == call else None
        keys = [key_of("new", i) for i in range(8)]
        for key in keys:
            store.put(key, 16, None, FINGERPRINT, arrays_of(key), lambda _, ok: done.append(ok))
        store.flush()
        assert len(done) == 8
        assert sum(done) == len(store.present(keys))
        for key in [*old, *keys]:
            snapshot = store.get(key, FINGERPRINT)
            assert snapshot is None or assert_is(snapshot, key) is None
        files.fail = lambda name, path: None
        store.put(keys[0], 16, None, FINGERPRINT, arrays_of(keys[0]))
        store.flush()
        assert_is(store.get(keys[0], FINGERPRINT), keys[0])
    if not all(done):
        assert warnings and len(warnings) <= 2
    if call != "unlink":  # what could not be removed is removed by the next one who opens the store
        assert list((folder / "tmp").glob("*.tmp")) == []


@pytest.mark.drawn(6)
@pytest.mark.parametrize("call", CALLS)
def test_a_disk_that_refuses_from_the_beginning(folder: Path, warnings: list[str], call: str) -> None:
    """Opening never fails for a fault of the disk in a folder that is there: the store is read, or empty."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)
    files = FaultyFiles(lambda name, path: read_only(path) if name == call else None)
    with Store.open(folder, warn=warnings.append, files=files) as store:
        put(store, "new")
        store.flush()
        for key in keys:
            if call in ("open", "kind"):  # what cannot be looked at is not read
                assert store.get(key, FINGERPRINT) is None
            else:
                assert_is(store.get(key, FINGERPRINT), key)


def test_a_read_only_folder_is_read(folder: Path, warnings: list[str]) -> None:
    """A shared, read-only store still saves the prefill."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*.*"))
    files = FaultyFiles(lambda call, path: read_only(path) if call in ("is_writable", "write", "unlink") else None)
    with Store.open(folder, warn=warnings.append, files=files) as store:
        assert store.is_read_only
        assert store.present(keys) == set(keys)
        assert len(store.get_chain(keys[2], FINGERPRINT).links) == 3
        done: list[bool] = []
        new = key_of("new", 16)
        assert not store.put(new, 16, None, FINGERPRINT, arrays_of(new), lambda _, ok: done.append(ok))
        store.touch(keys[0])
        store.flush()
        assert done == []
        with pytest.raises(UsageError, match="read-only"):
            store.prune(size_bytes=0)
    assert len(warnings) == 1 and "read-only" in warnings[0]
    after = [(path, path.stat().st_mtime_ns) for path in folder.rglob("*.*") if "sqlite-" not in path.name]
    assert sorted(after) == before


def test_an_index_on_a_read_only_medium_is_read(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite cannot read a write-ahead-log database where it may not make a file beside it, unless the URI says
    that nothing writes. (Permissions do not bind root, so the refusal is simulated.)"""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)

    class RefusingIndex(Index):
        def __init__(self, path: str, mode: str = "rwc") -> None:
            if mode != "immutable":
                raise IndexUnavailable("unable to open database file")
            super().__init__(path, mode)

    monkeypatch.setattr("apcbatch.store.folder.Index", RefusingIndex)
    with Store.open(folder, warn=warnings.append) as store:
        assert store.is_read_only and store.present(keys) == set(keys)
        assert_is(store.get(keys[1], FINGERPRINT), keys[1])
        assert store.stats().entries == 3
    assert len(warnings) == 1


def test_a_read_only_folder_without_an_index_is_empty(folder: Path, warnings: list[str]) -> None:
    folder.mkdir()
    files = FaultyFiles(lambda call, path: read_only(path) if call == "is_writable" else None)
    with Store.open(folder, warn=warnings.append, files=files) as store:
        assert store.present([key_of("a", 16)]) == set()
        with pytest.raises(UsageError, match="no index"):
            store.stats()
    assert len(warnings) == 1 and "the folder is read-only, and it has no index; the run continues" in warnings[0]


@pytest.mark.parametrize("number", [1, 5, 9])
def test_a_disk_that_is_nearly_full_at_the_first_opening(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Fault: an index that found no room for its tables was refused as another program's (exit 2), in this run
    and in every later one."""
    run, count = Database.run, 0

    def full(self: Database, statement: str, values: Values = ()) -> int:
        nonlocal count
        count += statement.startswith(("CREATE", "INSERT"))
        if count >= number:
            raise IndexUnavailable("database or disk is full")
        return run(self, statement, values)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "run", full)
        with Store.open(folder, warn=warnings.append) as store:
            key = key_of("a", 16)
            assert not store.put(key, 16, None, FINGERPRINT, arrays_of(key))
            assert store.present([key]) == set() and store.get(key, FINGERPRINT) is None
    assert len(warnings) == 1 and "full" in warnings[0]
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 2)
        store.flush()
        assert store.present(keys) == set(keys)
    assert len(warnings) == 1


def test_a_folder_that_vanishes_costs_no_answer(folder: Path, warnings: list[str]) -> None:
    """Somebody cleans up a scratch disk in the middle of a run."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)
        store.flush()
        shutil.rmtree(folder)
        assert store.get(keys[0], FINGERPRINT) is None
        done: list[bool] = []
        put(store, "b", 16, done)
        store.flush()
        assert done == [False]


def test_a_lock_that_the_system_refuses_leaves_no_file_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a descriptor that stays open each time that a file system without locks is asked for one."""

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(regular_files.fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No locks available"):
        environment.Files().lock(f"{folder}.lock", 0)
    assert os.listdir("/proc/self/fd") == before


def test_what_sqlite_says_is_cut_and_printable() -> None:
    """Catches bytes of a damaged index that move the terminal's cursor, or fill its screen."""
    with pytest.raises(database.IndexDamaged) as caught, database._BOUNDARY:
        raise sqlite3.DatabaseError("\x1b[2J" + "x" * 300)
    assert str(caught.value) == "?[2J" + "x" * 196


def test_a_limit_that_cannot_be_kept_is_said_and_costs_nothing(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: an eviction at the end of a run that the disk refuses ends it in a traceback."""
    with Store.open(folder, warn=warnings.append) as store:
        monkeypatch.setattr("apcbatch.store.store.prune", lambda *given: (_ for _ in ()).throw(read_only("there")))
        store.shrink()
    assert len(warnings) == 1 and "keeping to the size limit" in warnings[0]
