"""An index of which a bit or a value is wrong: the answers stay, the limit holds, every loop ends, and the next
run has a sound store. Seeded sweeps over the bytes of the file and over every column of every table."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.errors import UsageError
from apcbatch.store import BadSnapshot, Store
from apcbatch.store.database import _BOUNDARY, Database, IndexDamaged, IndexUnavailable
from apcbatch.store.environment import Files
from apcbatch.store.format import (
    INDEX_NAME,
    KEY_BYTES,
    MAX_FILE_BYTES,
    MAX_FINGERPRINT_BYTES,
    MAX_PRIORITY,
    STORE_ID_NAME,
    SUSPECT_NAME,
)
from apcbatch.store.repair import _enter_files, _put_aside, _require_sound_side_tables, require_schema
from tests.effort import table, tries
from tests.store.conftest import (
    FINGERPRINT,
    LAYOUT,
    assert_is,
    execute,
    key_of,
    num_bytes_in,
    path_of,
    put,
    put_chain,
)

LIMIT = 9_000
"""Room for eight of the snapshots here."""

COLUMNS = {
    "snapshots": "id key model position parent parent_position chained bytes children created last_used uses priority",
    "models": "id fingerprint name",
    "totals": "entries bytes clock",
    "in_flight": "session keys bytes",
    "meta": "name value",
}
VALUES: dict[str, object] = {
    "empty blob": b"", "blob": b"\xff" * 32, "long blob": bytes(33), "empty text": "", "text": "text",
    "long number": "9" * 400, "zero": 0, "negative": -1, "two": 2, "large": 2**62, "largest": 2**63 - 1,
    "least": -(2**63), "fraction": 0.5, "huge": 1e300, "infinite": float("inf"), "null": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two chains, that no call may change."""
    folder = tmp_path_factory.mktemp("sound") / "store"
    with Store.open(folder, LIMIT, warn=pytest.fail) as store:
        store.register(FINGERPRINT, "test model", LAYOUT)
        put_chain(store, "a", 4)
        put_chain(store, "b", 2)
    return folder


def run(folder: Path, name: str, warnings: list[str]) -> list[bool]:
    """A run over the store: reads everything that may be there, and offers more than there is room for."""
    done: list[bool] = []
    with Store.open(folder, LIMIT, warn=warnings.append) as store:
        store.register(FINGERPRINT, "test model", LAYOUT)
        keys = [key_of("a", 16 * (i + 1)) for i in range(4)] + [key_of("b", 16), key_of("b", 32)]
        store.present(keys)
        for key in keys:
            snapshot = store.get(key, FINGERPRINT)
            if snapshot is not None:
                assert_is(snapshot, key)
        store.touch(keys[0])
        for i in range(4):
            key = put(store, name, i, done)
        store.flush()
    return done


def assert_harmless(folder: Path, case: str) -> None:
    """What is promised of any damage to the index."""
    warnings: list[str] = []
    for number in range(3):
        before = num_bytes_in(folder)
        done = run(folder, f"run {number}", warnings)
        assert num_bytes_in(folder) <= max(LIMIT, 0 if any(done) else before), case
    assert len(warnings) <= 4, (case, warnings)
    damaged = "continues without it, and the next one" in "".join(warnings[-1:])
    assert all(done) or damaged, (case, "a run after the one that found the damage keeps nothing", warnings)
    with Store.open(folder, LIMIT, warn=warnings.append, maintenance=True) as store:
        store.check()
        assert store.check().faults == [], case
        assert store.stats().num_bytes == num_bytes_in(folder), case
        assert store.prune(size_bytes=0).num_left == 0, case
        assert num_bytes_in(folder) == 0, case


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("marked", [True, False])
def test_any_flipped_bit_of_the_index(sound: Path, folder: Path, marked: bool) -> None:
    """Fault: of 1,500 flips of a top bit 316 ended every run in UnicodeDecodeError, and others let the store
    grow far beyond its limit."""
    data = (sound / INDEX_NAME).read_bytes()
    written = [at for at in range(len(data)) if data[at]]  # most of the file is empty pages
    for _ in range(tries(36)):
        at, bit = random.choice(written), random.choice([7, 7, *range(8)])
        shutil.copytree(sound, folder)
        if not marked:
            (folder / STORE_ID_NAME).unlink()
        (folder / INDEX_NAME).write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        assert_harmless(folder, f"bit {bit} of byte {at}")
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("table", COLUMNS)
def test_any_value_of_any_type_in_any_column(sound: Path, folder: Path, table: str) -> None:
    """Fault: `in_flight.keys` as TEXT or INTEGER ended in TypeError; other values in tracebacks, or in
    eviction that frees nothing."""
    cases = [
        (column, name)
        for column in COLUMNS[table].split()
        for name in VALUES
        if (column, name) != ("value", "two")  # that is a newer store, which is refused
    ]
    for column, name in random.sample(cases, tries(min(len(cases), 60 if table == "snapshots" else 20))):
        shutil.copytree(sound, folder)
        execute(folder, "INSERT INTO in_flight VALUES (?, ?, ?)", "0" * 32, key_of("c", 16), 500)
        where = "WHERE position = 32" if table == "snapshots" and random.random() < 0.7 else ""
        try:
            execute(folder, f"UPDATE {table} SET {column} = ? {where}", VALUES[name])
        except sqlite3.Error:  # a value that the table itself refuses
            shutil.rmtree(folder)
            continue
        assert_harmless(folder, f"{table}.{column} is {name}")
        shutil.rmtree(folder)


def flip_keys(begin: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with sqlite3.connect(folder / INDEX_NAME) as db:
            for row, key in db.execute("SELECT id, key FROM snapshots").fetchall():
                wrong = key[:begin] + bytes([key[begin] ^ 0x10]) + key[begin + 1 :]
                db.execute("UPDATE snapshots SET key = ? WHERE id = ?", (wrong, row))
        db.close()

    return damage


LIES: dict[str, Callable[[Path], None]] = {
    "the part of a key that is its id": flip_keys(3),
    "the rest of a key": flip_keys(20),
    "the total": lambda folder: execute(folder, "UPDATE totals SET bytes = 1"),
    "a row's bytes": lambda folder: execute(folder, "UPDATE snapshots SET bytes = 1 WHERE position = 16"),
    "children": lambda folder: execute(folder, "UPDATE snapshots SET children = 1 WHERE position = 64"),
    "a snapshot as its own parent": lambda folder: execute(folder, "UPDATE snapshots SET parent = id"),
}


@pytest.mark.drawn(9)
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("maintenance", ["prune", "check", "prune while it is open"])
@pytest.mark.parametrize("name", LIES)
def test_the_limit_holds_and_maintenance_ends(
    sound: Path, folder: Path, warnings: list[str], name: str, maintenance: str
) -> None:
    """Fault: with one bit of a row's key flipped, eviction deleted nothing and counted it as freed: a limit of
    300 KiB left 18.7 MB, and `prune --size 0` and `check` looped without end."""
    shutil.copytree(sound, folder)
    if maintenance == "prune while it is open":
        with Store.open(folder, LIMIT, warn=warnings.append) as store:
            LIES[name](folder)
            try:
                store.prune(size_bytes=0)
            except UsageError as error:
                assert "run: apcbatch store check" in str(error)
        assert (folder / SUSPECT_NAME).exists() or num_bytes_in(folder) == 0 or "total" in name
    else:
        LIES[name](folder)
    done: list[bool] = []
    with Store.open(folder, LIMIT, warn=warnings.append) as store:
        for i in range(40):
            put(store, "new", i, done)
            if i % 4 == 3:
                store.flush()
                assert num_bytes_in(folder) <= LIMIT
    assert any(done)
    with Store.open(folder, LIMIT, warn=warnings.append, maintenance=True) as store:
        if maintenance == "check":
            store.check()
            assert store.check().faults == []
            assert store.stats().num_bytes == num_bytes_in(folder)
        assert store.prune(size_bytes=0).num_left == 0
    assert num_bytes_in(folder) == 0


def test_a_damaged_index_is_put_aside_once_and_not_destroyed(folder: Path, warnings: list[str]) -> None:
    """Fault: what was damaged is gone, or each damage leaves another copy."""
    with Store.open(folder, warn=warnings.append) as store:
        put_chain(store, "a", 3)
    for noise in (b"first" * 2000, b"second" * 2000):
        (folder / INDEX_NAME).write_bytes(noise)
        (folder / f"{INDEX_NAME}-wal").write_bytes(noise)
        with Store.open(folder, warn=warnings.append) as store:
            assert store.stats().entries == 3
        assert (folder / f"{INDEX_NAME}.damaged").read_bytes() == noise
    assert len(list(folder.glob("*.damaged"))) == 1 and len(warnings) == 2


def test_what_was_put_aside_before_goes(tmp_path: Path) -> None:
    """Fault: the log of an index that was put aside earlier stays beside the next one, of which it is no part."""
    files, path = Files(), tmp_path / INDEX_NAME
    for name in (INDEX_NAME, f"{INDEX_NAME}.damaged", f"{INDEX_NAME}.damaged-wal"):
        (tmp_path / name).write_text(name)
    _put_aside(files, str(path))
    assert [one.name for one in tmp_path.iterdir()] == [f"{INDEX_NAME}.damaged"]
    assert (tmp_path / f"{INDEX_NAME}.damaged").read_text() == INDEX_NAME
    path.write_text("next")
    (tmp_path / f"{INDEX_NAME}.damaged-shm").mkdir()
    with pytest.raises(OSError, match="damaged-shm"):
        _put_aside(files, str(path))
    assert path.read_text() == "next"


@table("change, damaged", [
    ("UPDATE totals SET entries = entries + 1", True), ("UPDATE totals SET bytes = bytes - 1", True),
    ("UPDATE totals SET clock = -1.0", True), (f"UPDATE totals SET clock = {2 * MAX_PRIORITY!r}", True),
    ("UPDATE snapshots SET children = children + 1 WHERE parent IS NULL", True),
    ("UPDATE totals SET clock = 0.0", False), (f"UPDATE totals SET clock = {MAX_PRIORITY!r}", False),
])  # fmt: skip
def test_each_total_is_compared_by_itself(tmp_path: Path, change: str, damaged: bool) -> None:
    """Catches a total that is only looked at where another one is wrong too: eviction goes by each of them."""
    warnings: list[str] = []
    with Store.open(tmp_path, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)
    execute(tmp_path, change)
    with Store.open(tmp_path, warn=warnings.append) as store:
        assert store.present(keys) == set(keys)
    assert ["its totals are not those of its rows" in line for line in warnings] == [True] * damaged


def test_a_new_index_says_what_is_in_it(folder: Path, warnings: list[str]) -> None:
    """Catches a count of snapshots that could not be used which leaves some out, or names a whole one; and bad files
    that are counted in its bytes."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 5)
    for key in keys[3:]:
        path_of(folder, key).write_bytes(b"nonsense")
    (folder / INDEX_NAME).write_bytes(b"noise" * 2000)
    with Store.open(folder, warn=warnings.append) as store:
        assert store.present(keys) == set(keys[:3])
        assert store.stats().num_bytes == num_bytes_in(folder)
    assert len(warnings) == 1
    assert warnings[0].endswith("from the snapshot files: 3 snapshots are in it, 2 could not be used")


def test_an_index_of_a_newer_sqlite_is_made_anew(folder: Path, warnings: list[str]) -> None:
    """Catches the byte that says so being looked for beside its place: SQLite calls such an index read-only."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 2)
    with open(folder / INDEX_NAME, "r+b") as file:
        file.seek(18)  # the write version; the next byte is the version to read, which stays
        file.write(b"\x09")
    with Store.open(folder, warn=warnings.append) as store:
        assert store.present(keys) == set(keys)
    assert len(warnings) == 1 and "it claims to be of a newer SQLite" in warnings[0]


def test_damage_that_a_run_finds_is_mended_by_the_next(folder: Path, warnings: list[str]) -> None:
    """Fault: what only a later call notices is never mended, and the store is of no use for good."""
    with Store.open(folder, LIMIT, warn=warnings.append) as store:
        put_chain(store, "a", 4)
        put_chain(store, "b", 4)
    execute(folder, "UPDATE snapshots SET priority = 'much'")
    assert run(folder, "first", warnings) == [False] * 4
    assert (folder / SUSPECT_NAME).exists() and len(warnings) == 1
    assert run(folder, "second", warnings) == [True] * 4
    assert not (folder / SUSPECT_NAME).exists() and "was put aside" in warnings[-1]


def test_a_key_in_the_place_of_another_is_damage(folder: Path, warnings: list[str]) -> None:
    """Fault: a row with the id of one key and the bytes of another passes for a snapshot that is not there."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 4)
        store.flush()
        flip_keys(3)(folder)
        assert store.present(keys) == set()
    assert (folder / SUSPECT_NAME).exists() and "a row has the id of another key" in warnings[-1]


def test_a_damaged_index_that_is_only_read(folder: Path, warnings: list[str]) -> None:
    """Fault: `store stat` of one ends in a traceback, or changes the store."""
    with Store.open(folder, warn=warnings.append) as store:
        put_chain(store, "a", 4)
    execute(folder, "UPDATE totals SET bytes = 'many'")
    with (
        Store.open(folder, warn=warnings.append, read_only=True) as store,
        pytest.raises(UsageError, match="damaged.*run: apcbatch store check"),
    ):
        store.stats()
    assert not (folder / SUSPECT_NAME).exists()


@table("table, row, is_sound", [
    ("in_flight", ("s", b"", 0), True), ("in_flight", ("s", b"", 1), False),
    *(("in_flight", ("s", bytes(count * KEY_BYTES), count * MAX_FILE_BYTES + over), not over)
      for count in (1, 2) for over in (0, 1)),
    ("in_flight", ("s", bytes(KEY_BYTES + 1), 0), False), ("models", (1, b"", "m"), False),
    ("models", (1, b"f", "m"), True), ("models", (1, bytes(MAX_FINGERPRINT_BYTES), "m"), True),
    ("models", (1, bytes(MAX_FINGERPRINT_BYTES + 1), "m"), False),
])  # fmt: skip
def test_the_bounds_of_models_and_reservations(table: str, row: tuple[object, ...], is_sound: bool) -> None:
    """Fault: a damaged reservation of exabytes leaves no room for any snapshot, or a sound index is made anew."""
    database: Any = SimpleNamespace(rows=lambda sql, *given: [row] if f"FROM {table}" in sql else [])
    with nullcontext() if is_sound else pytest.raises(IndexDamaged):
        _require_sound_side_tables(database)


def test_tables_of_another_program_are_no_index(folder: Path, warnings: list[str]) -> None:
    """Fault: an index with a table, a column or a trigger that this version does not know is written to."""
    with Store.open(folder, warn=warnings.append) as store:
        put_chain(store, "a", 2)
    for statement in ("CREATE TABLE more (x)", "DROP INDEX IF EXISTS more"):
        execute(folder, statement)
    database = Database(str(folder / INDEX_NAME), "rwc")
    try:
        with pytest.raises(IndexDamaged, match="its tables are not those of a snapshot store"):
            require_schema(database)
    finally:
        database.close()


def test_files_that_the_index_lost_are_entered_again(folder: Path, warnings: list[str]) -> None:
    """Fault: the last rows are lost in a power cut, and their files lie beside the size limit for good; or they are
    entered while another process has the store open, which may be removing them."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 8)
    execute(folder, "DELETE FROM snapshots WHERE position > 64")
    path_of(folder, keys[7]).write_bytes(b"nonsense")
    with Store.open(folder, warn=warnings.append, read_only=True) as reader:
        assert reader.present(keys) == set(keys[:4])
    limit = num_bytes_in(folder) // 2
    with Store.open(folder, limit, warn=warnings.append) as store:
        assert store.present(keys) == set(keys[:7]) and not path_of(folder, keys[7]).exists()
        assert warnings == [
            f"store {folder}: snapshot files were missing in the index, which a power cut can cause: 3 were entered, "
            "1 could not be used"
        ]
        store.shrink()
        assert store.present(keys) == set(keys[:3]) and num_bytes_in(folder) == store.stats().num_bytes <= limit
        execute(folder, "DELETE FROM snapshots WHERE position > 32")
        with Store.open(folder, warn=warnings.append) as other:
            assert other.present(keys) == set(keys[:2])
    assert len(warnings) == 1


def test_what_cannot_be_read_costs_its_own_row_alone() -> None:
    """Fault: an index that is made again ends at the first file that the disk does not give."""
    entered, removed = [], []
    header = SimpleNamespace(fingerprint=FINGERPRINT)

    def header_of(key: bytes) -> Any:
        if key != good:
            raise BadSnapshot("nonsense") if key == bad else OSError("the disk is away")
        return header

    away, bad, good = (key_of("a", number) for number in range(3))
    snapshots: Any = SimpleNamespace(
        all_keys=lambda: [away, bad, good, good], header=header_of, size=lambda key: 7, modified=lambda key: 1.0,
        remove=removed.append,
    )  # fmt: skip
    index: Any = SimpleNamespace(ids=set, model_id=lambda *_: 1, insert=lambda *row: entered.append(row))
    assert _enter_files(index, snapshots) == (1, 2)
    assert entered == [(header, 7, 1, 1.0)] and removed == [bad]


@table("error, becomes, words", [
    (MemoryError(), IndexUnavailable, "^out of memory$"),
    (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), IndexDamaged, "^a text in it is no text$"),
    (sqlite3.OperationalError("database is locked"), IndexUnavailable, "database is locked"),
    (sqlite3.DatabaseError("file is not a database"), IndexDamaged, "file is not a database"),
    (OverflowError("too large"), IndexDamaged, "too large"),
])  # fmt: skip
def test_an_error_of_the_library_says_whether_the_index_is_damaged(
    error: Exception, becomes: type[Exception], words: str
) -> None:
    """Fault: an index is made again because memory was short for a moment, or a damaged one is kept."""
    with pytest.raises(becomes, match=words), _BOUNDARY:
        raise error


def test_a_connection_that_cannot_be_set_up_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: each try leaves a file open."""
    closed: list[bool] = []

    def fails(*_: object) -> None:
        raise IndexUnavailable("away")

    monkeypatch.setattr(Database, "run", fails)
    close = Database.close
    monkeypatch.setattr(Database, "close", lambda self: closed.append(True) or close(self))
    with pytest.raises(IndexUnavailable, match="away"):
        Database(str(tmp_path / "x"), "rwc")
    assert closed == [True]
