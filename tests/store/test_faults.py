"""The store when things break: each fault costs speed, says so in one line, and never gives an answer or
raises."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from apcbatch.errors import UsageError
from apcbatch.store import Store
from apcbatch.store.index import Index
from apcbatch.store.notices import MAX_BAD_SNAPSHOT_LINES
from apcbatch.store.objects import Objects
from tests.store.conftest import FINGERPRINT, arrays_of, assert_is, key_of, object_files, path_of, put_chain
from tests.store.faults import CALLS, FaultyFiles, PowerCutFiles, bad_sector, disk_full, read_only

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda data: data[:-1],
    "cut in the header": lambda data: data[:100],
    "zero length": lambda data: b"",
    "bit flipped in a tensor": lambda data: data[:-5] + bytes([data[-5] ^ 4]) + data[-4:],
    "bit flipped in the header": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "all zeros": lambda data: bytes(len(data)),
    "longer": lambda data: data + b"\0",
    "huge header length": lambda data: (1 << 62).to_bytes(8, "little") + data[8:],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_a_miss_with_one_line_and_then_computed_again(
    store: Store, folder: Path, warnings: list[str], name: str
) -> None:
    """Case 17. The file goes, so that the recomputed snapshot can take its place."""
    keys = put_chain(store, "a", 3)
    store.flush()
    path = path_of(folder, keys[1])
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    assert store.get(keys[1], FINGERPRINT) is None
    assert store.get(keys[1], FINGERPRINT) is None
    assert store.present(keys) == {keys[0], keys[2]}
    assert len(warnings) == 1 and keys[1].hex() in warnings[0] and "computed again" in warnings[0]
    assert store.put(keys[1], 32, (keys[0], 16), FINGERPRINT, arrays_of(keys[1]))
    store.flush()
    assert store.present(keys) == set(keys)
    assert_is(store.get(keys[1], FINGERPRINT), keys[1])
    assert store.counters.bad == 1 and len(warnings) == 1


def test_a_file_under_another_ones_name_is_a_miss(store: Store, folder: Path, warnings: list[str]) -> None:
    """A valid snapshot of other tokens is the worst wrong answer: nothing about its bytes is wrong."""
    keys = put_chain(store, "a", 2)
    store.flush()
    shutil.copy(path_of(folder, keys[0]), path_of(folder, keys[1]))
    assert store.get(keys[1], FINGERPRINT) is None
    assert keys[0].hex() in warnings[0]


def test_a_link_that_does_not_join_is_stranded_and_goes(
    store: Store, folder: Path, warnings: list[str]
) -> None:
    """Two chains of one prefix on different grids: KV from 16 on must not be put after KV that ends at 32."""
    keys = put_chain(store, "a", 2)
    child = key_of("child", 48)
    store.flush()
    store.put(child, 48, (keys[1], 31), FINGERPRINT, arrays_of(child, tokens=17))
    store.flush()
    chain = store.get_chain(child, FINGERPRINT)
    assert (chain.miss, chain.stranded_at) == ("stranded", 48)
    store.flush()
    assert store.present([*keys, child]) == set(keys) and not path_of(folder, child).exists()
    assert len(warnings) == 1


def test_a_bad_ancestor_strands_and_is_named(store: Store, folder: Path, warnings: list[str]) -> None:
    keys = put_chain(store, "a", 5)
    store.flush()
    path = path_of(folder, keys[2])
    path.write_bytes(path.read_bytes()[:-1])
    chain = store.get_chain(keys[4], FINGERPRINT)
    assert (chain.miss, chain.stranded_at) == ("stranded", 48)
    assert len(warnings) == 1 and keys[2].hex() in warnings[0]


def test_thousands_of_bad_files_do_not_flood_the_terminal(
    store: Store, folder: Path, warnings: list[str]
) -> None:
    keys = put_chain(store, "a", MAX_BAD_SNAPSHOT_LINES + 15)
    store.flush()
    for path in object_files(folder):
        path.write_bytes(b"")
    assert all(store.get(key, FINGERPRINT) is None for key in keys)
    assert len(warnings) == MAX_BAD_SNAPSHOT_LINES + 1 and "apcbatch store check" in warnings[-1]


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


@pytest.mark.parametrize("kept", [0, 1, 500, 900])
def test_a_power_cut_that_keeps_names_and_loses_bytes(folder: Path, warnings: list[str], kept: int) -> None:
    """Nothing is synced file by file, so this happens: the checksum has to catch it."""
    with Store.open(folder, warn=warnings.append, files=PowerCutFiles(kept)) as store:
        keys = put_chain(store, "a", 3)
    with Store.open(folder, warn=warnings.append) as store:
        assert all(store.get(key, FINGERPRINT) is None for key in keys)
        store.flush()
        assert store.stats().entries == 0
    assert len(warnings) == 3


@pytest.mark.parametrize("error", [disk_full, read_only, bad_sector], ids=["full", "read-only", "bad sector"])
@pytest.mark.parametrize("call", ["make_folders", "write", "rename", "unlink"])
def test_a_disk_that_refuses_costs_the_snapshots_and_no_more(
    folder: Path, warnings: list[str], call: str, error: Callable[[str], OSError]
) -> None:
    """Case 19, at each call that changes the disk: nothing raises, everybody is called back, nothing
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


@pytest.mark.parametrize("call", CALLS)
def test_a_disk_that_refuses_from_the_beginning(folder: Path, warnings: list[str], call: str) -> None:
    """Opening never fails for a fault of the disk in a folder that is there: the store is read, or empty."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)
    files = FaultyFiles(lambda name, path: read_only(path) if name == call else None)
    with Store.open(folder, warn=warnings.append, files=files) as store:
        new = key_of("new", 16)
        store.put(new, 16, None, FINGERPRINT, arrays_of(new))
        store.flush()
        for key in keys:
            if call == "open":
                assert store.get(key, FINGERPRINT) is None
            else:
                assert_is(store.get(key, FINGERPRINT), key)


def test_a_read_only_folder_is_read(folder: Path, warnings: list[str]) -> None:
    """A shared, read-only store still saves the prefill."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*.*"))
    files = FaultyFiles(
        lambda call, path: read_only(path) if call in ("is_writable", "write", "unlink") else None
    )
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
    """SQLite cannot read a write-ahead-log database where it may not make a file beside it, unless it is told
    that nobody writes. (Permissions do not bind root, so the refusal is simulated.)"""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)

    class RefusingIndex(Index):
        def __init__(self, path: str, mode: str = "rwc") -> None:
            if mode != "immutable":
                raise sqlite3.OperationalError("unable to open database file")
            super().__init__(path, mode)

    monkeypatch.setattr("apcbatch.store.opening.Index", RefusingIndex)
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
    assert len(warnings) == 2


def test_a_folder_that_cannot_be_made_is_a_usage_error(folder: Path, warnings: list[str]) -> None:
    """Before any weight is loaded: a mistyped --store must not cost an hour of computing."""
    files = FaultyFiles(lambda call, path: read_only(path) if call == "make_folders" else None)
    with pytest.raises(UsageError, match="cannot be made"):
        Store.open(folder, warn=warnings.append, files=files)


def test_a_folder_that_vanishes_costs_no_answer(folder: Path, warnings: list[str]) -> None:
    """Somebody cleans up a scratch disk in the middle of a run."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)
        store.flush()
        shutil.rmtree(folder)
        assert store.get(keys[0], FINGERPRINT) is None
        done: list[bool] = []
        key = key_of("b", 16)
        store.put(key, 16, None, FINGERPRINT, arrays_of(key), lambda _, ok: done.append(ok))
        store.flush()
        assert done == [False]


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
    num_bytes = sum(path.stat().st_size for path in object_files(folder))
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


def test_a_rebuilt_index_leaves_out_what_is_bad(folder: Path, warnings: list[str]) -> None:
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 4)
    path_of(folder, keys[3]).write_bytes(b"x" * 1000)
    (folder / "index.sqlite").unlink()
    with Store.open(folder, warn=warnings.append) as store:
        assert store.present(keys) == set(keys[:3])
        assert store.stats().num_bytes == sum(path.stat().st_size for path in object_files(folder))


def test_an_index_damaged_in_the_middle_of_a_run(folder: Path, warnings: list[str]) -> None:
    """Nothing raises, one line or two say so, and the next run has a sound store."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 400)
        store.flush()
        store._index._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with open(folder / "index.sqlite", "r+b") as file:
            file.seek(4096)
            file.write(os.urandom(120_000))
        for i in range(3):
            store.present(keys)
            more = key_of("b", i)
            store.put(more, 16, None, FINGERPRINT, arrays_of(more))
            store.flush()
    assert 1 <= len(warnings) <= 3
    with Store.open(folder, warn=warnings.append) as store:
        for key in keys:
            snapshot = store.get(key, FINGERPRINT)
            assert snapshot is None or assert_is(snapshot, key) is None
        assert len(store.present(keys)) == 400


def test_a_locked_index_costs_the_snapshots(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that hangs with the write lock must not hang the run."""
    monkeypatch.setattr("apcbatch.store.index.BUSY_TIMEOUT_S", 0.05)
    done: list[bool] = []
    with Store.open(folder, warn=warnings.append) as store:
        other = sqlite3.connect(folder / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        key = key_of("a", 16)
        store.put(key, 16, None, FINGERPRINT, arrays_of(key), lambda _, ok: done.append(ok))
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
                raise sqlite3.OperationalError("database or disk is full")

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
    header, count = Objects.header, 0

    def killed(self: Objects, key: bytes) -> object:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return header(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "header", killed)
        with pytest.raises(KeyboardInterrupt):
            Store.open(folder, warn=warnings.append)
    with Store.open(folder, warn=warnings.append) as store:
        assert store.present(keys) == set(keys)


def test_a_callback_that_fails_does_not_leave_anybody_waiting(folder: Path, warnings: list[str]) -> None:
    """A fault in the caller's own code ends the store's thread; a flush that waits for it would hang the
    run."""
    seen: list[threading.ExceptHookArgs] = []
    hook, threading.excepthook = threading.excepthook, seen.append
    try:
        with Store.open(folder, warn=warnings.append) as store:
            key = key_of("a", 16)
            store.put(key, 16, None, FINGERPRINT, arrays_of(key), lambda *_: 1 // 0)
            store.flush()
            assert not store.put(key_of("b", 16), 16, None, FINGERPRINT, arrays_of(key))
    finally:
        threading.excepthook = hook
    assert len(seen) == 1


KILLED = """
import os, signal, sys
from apcbatch.store import Store
from tests.store.conftest import put_chain
from tests.store.faults import FaultyFiles

folder, call, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
calls = 0

def kill(name, path):
    global calls
    if name == call and (path.endswith(".tmp") or path.endswith(".safetensors")):
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

store = Store.open(folder, 20_000, warn=print, files=FaultyFiles(kill))
for round_number in range(4):
    put_chain(store, f"round {round_number}", 10)
    store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("call", "number"),
    [("write", 17), ("rename", 1), ("rename", 25), ("unlink", 1), ("unlink", 9), ("none", 0)],
)
def test_a_kill_leaves_nothing_half_true(folder: Path, warnings: list[str], call: str, number: int) -> None:
    """Case 17: killed while writing, between writing and naming, between naming and the index, while
    evicting, and at the end. What the next one sees is whole, what nobody can see takes no room, and the
    limit still holds."""
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder), call, str(number)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    with Store.open(folder, 20_000, warn=warnings.append) as store:
        keys = [key_of(f"round {i}", 16 * (j + 1)) for i in range(4) for j in range(10)]
        present = store.present(keys)
        files = {path.stem for path in object_files(folder)}
        assert {key.hex() for key in present} >= files, "a file without a row would never be counted"
        assert sum(path.stat().st_size for path in object_files(folder)) <= 20_000
        assert list((folder / "tmp").glob("*.tmp")) == []
        for key in present:
            snapshot = store.get(key, FINGERPRINT)
            assert snapshot is None if key.hex() not in files else assert_is(snapshot, key) is None
        put_chain(store, "after", 10)
        store.flush()
        assert store.check().faults == []
        assert store.stats().num_bytes <= 20_000
    if call in ("write", "rename", "none"):
        assert warnings == []
