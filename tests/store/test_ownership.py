"""The store touches only what it made: other people's folders, files, links and pipes stay as they are."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apcbatch.errors import UsageError
from apcbatch.store import Store
from apcbatch.store.format import INDEX_NAME, LOCK_NAME, STORE_ID, STORE_ID_NAME
from tests.effort import table
from tests.store.conftest import FINGERPRINT, arrays_of, assert_is, key_of, object_files, path_of, put_chain
from tests.store.faults import FaultyFiles, bad_sector, disk_full, read_only

SESSION = "0123456789abcdef" * 2


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every path below a folder with what is there: bytes, where a link leads, or a word."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else "folder" if path.is_dir() else "special"
    return found


def tmp_of_a_user(folder: Path) -> None:
    (folder / "tmp").mkdir()
    (folder / "tmp" / "thesis.txt").write_text("x")


def photo_library(folder: Path) -> None:
    with sqlite3.connect(folder / INDEX_NAME) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE photos (name TEXT)")
    db.close()


def objects_of_a_user(folder: Path) -> None:
    path = path_of(folder, key_of("a", 16))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"my own tensors")


def of_a_newer_version(folder: Path) -> None:
    """Its index is damaged too, which an older program would make anew."""
    (folder / STORE_ID_NAME).write_text("apcbatch snapshot store 2\n")
    (folder / INDEX_NAME).write_bytes(b"x" * 5000)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a tmp folder": tmp_of_a_user,
    "a file": lambda folder: (folder / "notes.txt").write_text("x"),
    "a hidden file": lambda folder: (folder / ".git").mkdir(),
    "a database": photo_library,
    "an empty file named as the index": lambda folder: (folder / INDEX_NAME).touch(),
    "a file of noise named as the index": lambda folder: (folder / INDEX_NAME).write_bytes(b"noise" * 2000),
    "a file named as a snapshot": objects_of_a_user,
    "a file named as the id file": lambda folder: (folder / STORE_ID_NAME).write_text("our shop in town"),
    "a link named as the id file": lambda folder: (folder / STORE_ID_NAME).symlink_to("/etc/hostname"),
    "a cut id file beside a file": lambda folder: [
        (folder / STORE_ID_NAME).write_bytes(STORE_ID[:5]),
        (folder / "notes.txt").write_text("x"),
    ],
    "newer": of_a_newer_version,
}


@table("how", ["run", "read_only", "maintenance"])
@table("name", FOREIGN)
def test_a_folder_that_is_no_store_is_refused_untouched(
    tmp_path: Path, warnings: list[str], name: str, how: str
) -> None:
    """Fault: `store check p`, `doctor --store p` and `run --store p` deleted p/tmp/thesis.txt; the folder of another
    program, or of a newer version, has a file that is put aside as a damaged index."""
    FOREIGN[name](tmp_path)
    before = contents(tmp_path)
    said = "store format 2.*newer apcbatch" if name == "newer" else "not a snapshot store and not empty"
    with pytest.raises(UsageError, match=said):
        Store.open(tmp_path, warn=warnings.append, **({} if how == "run" else {how: True}))
    assert contents(tmp_path) == before and warnings == []


@table("name, options, said", [
    *((name, {}, "the store folder .* cannot be made: [^[]*; give another --store")
      for name in ("/proc/x", "/proc/x/y/z", "/dev/null/x", "loop/x", "nowhere/x")),
    ("refused", {"files": FaultyFiles(lambda call, path: read_only(path) if call == "make_folders" else None)},
     "cannot be made"),
    ("file", {}, "not a folder"), *(("new", {how: True}, "there is no store") for how in ("read_only", "maintenance")),
])  # fmt: skip
def test_a_place_where_no_store_can_be(
    tmp_path: Path, warnings: list[str], name: str, options: dict[str, Any], said: str
) -> None:
    """Fault: --store /proc/x ends in a RecursionError, another place in a line without a way out; `store stat` of a
    mistyped path makes a store there; a mistyped --store costs an hour of computing."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("missing/folder")
    (tmp_path / "file").write_text("hello")
    with pytest.raises(UsageError, match=said):
        Store.open(tmp_path / name, warn=warnings.append, **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("options", [{"read_only": True}, {"maintenance": True}])
def test_an_empty_folder_is_made_a_store_only_by_a_run(
    folder: Path, warnings: list[str], options: dict[str, bool]
) -> None:
    """Fault: `store check` of a mistyped folder made a store in it."""
    folder.mkdir()
    with pytest.raises(UsageError, match="there is no store"):
        Store.open(folder, warn=warnings.append, **options)
    assert contents(folder) == {}
    Store.open(folder, warn=warnings.append).close()
    assert (folder / STORE_ID_NAME).read_bytes() == STORE_ID
    Store.open(folder, warn=warnings.append, **options).close()


def test_the_marker_is_on_the_disk_before_anything_else(folder: Path, warnings: list[str]) -> None:
    """Fault: a store that was killed or cut off while it was made is not known as one, or refuses the next
    run."""
    calls: list[tuple[str, str]] = []
    files = FaultyFiles(lambda call, path: calls.append((call, Path(path).name)))
    Store.open(folder, warn=warnings.append, files=files).close()
    changes = [call for call in calls if call[0] in ("make_folders", "write_durably", "lock", "write")]
    assert changes[:2] == [("make_folders", "store"), ("write_durably", STORE_ID_NAME)]
    for left in (b"", STORE_ID[:7], STORE_ID):
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / STORE_ID_NAME).write_bytes(left)
        with Store.open(folder, warn=warnings.append) as store:
            assert not store.is_read_only
        assert (folder / STORE_ID_NAME).read_bytes() == STORE_ID
    assert warnings == []


@pytest.mark.parametrize("lost", [[], ["index"], ["objects"]])
def test_a_store_of_an_earlier_version_has_no_marker_and_is_known(
    folder: Path, warnings: list[str], lost: list[str]
) -> None:
    """Fault: stores made before there were id files are refused, whole or with only their index or their files
    left."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)
    (folder / STORE_ID_NAME).unlink()
    if "index" in lost:
        (folder / INDEX_NAME).write_bytes(b"nothing of use")
    if "objects" in lost:
        shutil.rmtree(folder / "objects")
    with Store.open(folder, warn=warnings.append, read_only=True) as store:
        assert (store.get(keys[2], FINGERPRINT) is None) == ("objects" in lost)
    assert not (folder / STORE_ID_NAME).exists()
    with Store.open(folder, warn=warnings.append) as store:
        assert not store.is_read_only
    assert (folder / STORE_ID_NAME).read_bytes() == STORE_ID


def test_a_folder_that_cannot_be_looked_into_costs_the_snapshots(folder: Path, warnings: list[str]) -> None:
    """Fault: a disk that fails at the first look ends the run, or a new store is made over an old one."""
    folder.mkdir()
    files = FaultyFiles(lambda call, path: bad_sector(path) if call in ("names", "open") else None)
    with Store.open(folder, warn=warnings.append, files=files) as store:
        assert store.is_read_only
    assert len(warnings) == 1 and contents(folder) == {}


def test_sweeps_remove_only_the_names_that_a_session_writes(folder: Path, warnings: list[str]) -> None:
    """Fault: every file in tmp was removed."""
    Store.open(folder, warn=warnings.append).close()
    outside = folder.parent / "outside.txt"
    outside.write_text("mine")
    ours = [f"{SESSION}-0.tmp", f"{SESSION}-123.tmp", f"{SESSION}.lock"]
    others = [
        "thesis.txt",
        f"{SESSION}.tmp",
        f"{SESSION}-x.tmp",
        f"{SESSION}-1.tmp.bak",
        f"{SESSION.upper()}-1.tmp",
        f"{SESSION[1:]}-1.tmp",
        "x.lock",
    ]
    for name in [*ours, *others]:
        (folder / "tmp" / name).write_text("x")
    (folder / "tmp" / f"{SESSION}-7.tmp").symlink_to(outside)
    (folder / "tmp" / f"{SESSION}-8.tmp").mkdir()
    os.mkfifo(folder / "tmp" / f"{SESSION}-9.tmp")
    os.mkfifo(folder / "tmp" / f"{'a' * 32}.lock")
    with Store.open(folder, warn=warnings.append) as store:
        assert not store.is_read_only and store.check().faults == []
    left = {f"{SESSION}-7.tmp", f"{SESSION}-8.tmp", f"{SESSION}-9.tmp", f"{'a' * 32}.lock", *others}
    assert {path.name for path in (folder / "tmp").iterdir()} == left
    assert outside.read_text() == "mine" and warnings == []


@pytest.mark.parametrize("name", ["tmp", "objects"])
def test_a_folder_of_the_store_that_is_a_link_is_not_followed(folder: Path, warnings: list[str], name: str) -> None:
    """Fault: `tmp` was followed where it is a link, and what it leads to was swept."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 2)
    elsewhere = folder.parent / "elsewhere"
    (folder / name).rename(elsewhere)
    (elsewhere / f"{SESSION}-0.tmp").write_text("x")
    (folder / name).symlink_to(elsewhere)
    before = contents(elsewhere)
    with Store.open(folder, warn=warnings.append) as store:
        assert store.is_read_only
        assert (store.get(keys[0], FINGERPRINT) is not None) == (name == "tmp")
    assert contents(elsewhere) == before
    assert len(warnings) <= 2 and "not a plain folder" in warnings[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_linked_folder_of_snapshots_is_not_followed(folder: Path, warnings: list[str], depth: int) -> None:
    """Fault: snapshots are read, written or removed through a link below `objects`."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 1)
    linked = path_of(folder, keys[0]).parents[2 - depth]
    elsewhere = folder.parent / "elsewhere"
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    before = contents(elsewhere)
    with Store.open(folder, warn=warnings.append) as store:
        assert store.get(keys[0], FINGERPRINT) is None
        assert any(str(linked) in fault and "left alone" in fault for fault in store.check().faults)
        assert store.prune(size_bytes=0).num_left == 0
        done: list[bool] = []
        store.put(keys[0], 16, None, FINGERPRINT, arrays_of(keys[0]), lambda _, ok: done.append(ok))
        store.flush()
        assert done == [False]
    assert contents(elsewhere) == before and linked.is_symlink()


def make_socket(path: Path) -> None:
    """Bound by a short name: a socket's path has 107 bytes at most."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to(path.parent / "nowhere"),
    "socket": make_socket,
}


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", SPECIAL)
def test_something_else_in_the_place_of_a_snapshot(folder: Path, warnings: list[str], kind: str) -> None:
    """Fault: a pipe in the place of a snapshot hangs the run; a link or a folder there is removed, or ends
    eviction for good. It is a miss with one line, and stays."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)
    path = path_of(folder, keys[2])
    path.unlink()
    SPECIAL[kind](path)
    before = os.lstat(path)
    with Store.open(folder, warn=warnings.append) as store:
        assert store.get(keys[2], FINGERPRINT) is None
        assert_is(store.get(keys[1], FINGERPRINT), keys[1])
        assert any(str(path) in fault for fault in store.check().faults)
        assert store.prune(size_bytes=0).num_left == 0
        assert [other for other in object_files(folder) if other != path] == []
        done: list[bool] = []
        store.put(keys[2], 16, None, FINGERPRINT, arrays_of(keys[2]), lambda _, ok: done.append(ok))
        store.flush()
        assert done == [False]
    assert os.path.samestat(os.lstat(path), before)
    assert 1 <= len(warnings) <= 2


@pytest.mark.drawn(10)
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [INDEX_NAME, f"{INDEX_NAME}-wal", LOCK_NAME, STORE_ID_NAME])
def test_something_else_in_the_place_of_a_file_of_the_store(
    folder: Path, warnings: list[str], name: str, kind: str
) -> None:
    """Fault: a pipe in the place of the index hangs the run; a link there is written through. The run continues
    with one line, and what is there stays."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)
    (folder / name).unlink(missing_ok=True)
    SPECIAL[kind](folder / name)
    before = os.lstat(folder / name)
    with Store.open(folder, warn=warnings.append) as store:
        assert store.is_read_only
        assert_is(store.get(keys[2], FINGERPRINT), keys[2])
    assert len(warnings) == 1
    assert os.path.samestat(os.lstat(folder / name), before)
    assert not (folder / "nowhere").exists()


def test_descriptors_do_not_grow_with_what_is_read(folder: Path, warnings: list[str]) -> None:
    """Fault: a descriptor is leaked at every snapshot that is read, bad, missing or no file at all."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 8)
        store.flush()
        path_of(folder, keys[5]).write_bytes(b"x" * 900)
        path_of(folder, keys[6]).unlink()
        path_of(folder, keys[6]).mkdir()
        num_read = 0
        for turn in range(21):  # each of which finds the bad ones anew; SQLite keeps a descriptor of the first one
            if turn == 1:
                before = descriptors()
            with Store.open(folder, warn=warnings.append, read_only=True) as reader:
                for key in [*keys, key_of("missing", 16)]:
                    reader.get(key, FINGERPRINT)
                reader.get_chain(keys[4], FINGERPRINT)
                num_read += reader.counters.read
        assert num_read >= 100
        store.get(keys[5], FINGERPRINT)
        store.check()
        store.flush()
        assert descriptors() == before


def test_a_disk_that_is_full_at_the_first_opening(folder: Path, warnings: list[str]) -> None:
    """Fault: not even the id file has room, and the run is refused, or the folder is refused ever after."""
    files = FaultyFiles(lambda call, path: disk_full(path) if call == "write_durably" else None)
    with Store.open(folder, warn=warnings.append, files=files) as store:
        assert store.is_read_only
    assert len(warnings) == 1
    with Store.open(folder, warn=warnings.append) as store:
        put_chain(store, "a", 1)
        store.flush()
    assert len(object_files(folder)) == 1
