"""`store check` and `store prune`: what they find, and what they do about it."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from apcbatch.errors import UsageError
from apcbatch.store import Store
from apcbatch.store import index as index_module
from apcbatch.store.database import Entry, IndexDamaged, entry_of, is_count, row_id
from apcbatch.store.environment import Files
from apcbatch.store.format import INDEX_NAME, MAX_FILE_BYTES, make_header
from apcbatch.store.index import Index
from apcbatch.store.snapshot_file import BadSnapshot, SnapshotFolder
from tests.effort import table
from tests.store.conftest import (
    FINGERPRINT,
    arrays_of,
    assert_is,
    execute,
    key_of,
    num_bytes_in,
    object_files,
    path_of,
    put_chain,
)


def test_check_lists_each_fault_and_repairs_it(store: Store, folder: Path) -> None:
    """Each kind at once: afterwards index and files agree, and a second check finds nothing."""
    keys = put_chain(store, "a", 20)
    store.flush()
    sound = store.check()
    assert (sound.num_verified, sound.faults, sound.num_bytes) == (20, [], num_bytes_in(folder))
    bad, gone, orphan, wrong = keys[19], keys[18], keys[5], keys[7]
    path_of(folder, bad).write_bytes(b"nonsense")
    path_of(folder, gone).unlink()
    execute(folder, "DELETE FROM snapshots WHERE key = ?", orphan)
    execute(folder, "UPDATE snapshots SET position = 9999, bytes = 1 WHERE key = ?", wrong)
    execute(folder, "UPDATE totals SET bytes = 12345")
    stale = folder / "tmp" / f"{'0' * 32}-1.tmp"
    stale.write_bytes(b"half")
    stranger = folder / "objects" / "x" / "y" / "notes.txt"
    stranger.parent.mkdir(parents=True)
    stranger.write_text("mine")

    report = store.check()
    for path in [*(path_of(folder, key) for key in (bad, gone, orphan, wrong)), stale]:
        assert sum(str(path) in fault for fault in report.faults) == 1, path
    assert any("notes.txt" in fault and "left alone" in fault for fault in report.faults)
    assert len(report.faults) == 6
    assert (report.num_verified, report.num_adopted, report.num_rows_dropped) == (18, 2, 1)
    assert report.num_files_removed == 2 and not stale.exists() and not path_of(folder, bad).exists()
    assert stranger.exists()
    assert store.present(keys) == set(keys[:18])
    assert store.stats().num_bytes == num_bytes_in(folder)
    stranger.unlink()
    assert store.check().faults == []


def test_after_a_check_eviction_still_goes_from_the_ends(folder: Path, warnings: list[str]) -> None:
    """Adopted rows must count their children, or an ancestor goes first."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 12)
        store.flush()
        execute(folder, "DELETE FROM snapshots WHERE position IN (48, 64, 128)")
        assert store.check().num_adopted == 3
        store.prune(size_bytes=store.stats().num_bytes // 2)
        present = store.present(keys)
        assert 4 <= len(present) <= 6 and present == set(keys[: len(present)])


def test_a_read_only_check_changes_nothing(folder: Path, warnings: list[str]) -> None:
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 6)
    path_of(folder, keys[5]).write_bytes(b"nonsense")
    path_of(folder, keys[4]).unlink()
    execute(folder, "DELETE FROM snapshots WHERE key = ?", keys[0])
    with Store.open(folder, warn=warnings.append, read_only=True) as store:
        report = store.check()
    assert len(report.faults) == 3
    assert (report.num_adopted, report.num_rows_dropped, report.num_files_removed) == (0, 0, 0)
    assert path_of(folder, keys[5]).exists()


def test_check_counts_the_stranded(store: Store, folder: Path) -> None:
    """They are whole, so they are no fault; but they are unusable before their parent is back."""
    keys = put_chain(store, "a", 6)
    store.flush()
    path_of(folder, keys[2]).unlink()
    assert store.check().num_stranded == 1
    assert store.stats().num_stranded == 1
    store.put(keys[2], 48, (keys[1], 32), FINGERPRINT, arrays_of(keys[2]))
    assert store.check().num_stranded == 0


def test_prune_to_a_size_keeps_usable_chains(store: Store, folder: Path) -> None:
    keys = put_chain(store, "a", 20)
    store.flush()
    before = store.stats()
    report = store.prune(size_bytes=before.num_bytes // 2)
    left = store.stats()
    assert (report.num_left, report.num_bytes_left) == (left.entries, left.num_bytes)
    assert report.num_removed == 20 - left.entries and report.num_bytes_removed == before.num_bytes - left.num_bytes
    assert left.num_bytes <= before.num_bytes // 2 and left.num_stranded == 0
    assert len(object_files(folder)) == left.entries
    assert len(store.get_chain(keys[left.entries - 1], FINGERPRINT).links) == left.entries


def test_prune_by_age_spares_the_ancestors_of_what_is_in_use(store: Store, folder: Path) -> None:
    """An old prefix with a young leaf is in use, although no reader consumed the prefix itself."""
    old, mixed = put_chain(store, "old", 4), put_chain(store, "mixed", 4)
    store.flush()
    execute(folder, "UPDATE snapshots SET last_used = last_used - 1000 WHERE key != ?", mixed[3])
    report = store.prune(older_than_s=500)
    assert report.num_removed == 4
    assert store.present([*old, *mixed]) == set(mixed)


@pytest.mark.parametrize("called", ["other model", (b"\xab" * 32).hex()[:10]])
def test_prune_of_one_model(store: Store, folder: Path, called: str) -> None:
    """Trying out a new checkpoint must not cost the snapshots of the other one."""
    other = b"\xab" * 32
    store.register(other, "other model")
    keys = put_chain(store, "a", 4)
    theirs = [key_of("theirs", i) for i in range(3)]
    for key in theirs:
        store.put(key, 16, None, other, arrays_of(key))
    assert store.prune(model=called).num_removed == 3
    assert store.present([*keys, *theirs]) == set(keys)
    assert_is(store.get(keys[0], FINGERPRINT), keys[0])


def test_a_fingerprint_is_known_by_four_digits(folder: Path) -> None:
    """Fault: `prune --model a` drops every model whose fingerprint begins so."""
    with closing(_index(folder)) as index:
        ids = [index.model_id(bytes([0xAB, number]) * 16, name) for number, name in ((1, "one"), (2, "ab0"))]
        assert [index.model_ids(name) for name in ("AB01", "ab0", "ab", "ab0201", "")] == [ids[:1], ids[1:], [], [], []]
        assert index.model_ids("ab02ab02") == ids[1:]


def test_the_index_is_looked_up_in_parts_and_synced_at_checkpoints(folder: Path) -> None:
    """Fault: a key that is asked for in two parts of a long list is not found. Or each transaction waits for the
    disk."""
    with closing(_index(folder)) as index:
        assert index.database.row("PRAGMA synchronous", (), is_count) == (1,)
        model = index.model_id(FINGERPRINT, None)
        keys = [key_of("a", number) for number in range(3)]
        for key in keys[:2]:
            index.insert(make_header(key, FINGERPRINT, 16, None, arrays_of(key)), 10, model, 1.0)
        for count in (1, 2, 3, 4):
            assert index.sharing(count * index_module._KEYS_A_QUERY * [keys[0]] + keys[1:]) == set(keys[:2])
        assert index.present([keys[0][:8] + bytes(24)]) == set()
        assert index.sharing([keys[0][:8] + bytes(24)]) == {keys[0]}


@table("changed, is_sound", [
    ({}, True), ({1: 33}, True), ({1: 32}, False), ({1: 31}, False), ({2: 0}, False), ({2: 1}, True),
    ({2: MAX_FILE_BYTES}, True), ({2: MAX_FILE_BYTES + 1}, False), ({0: b"other key"}, False),
])  # fmt: skip
def test_a_row_is_checked_when_it_is_read(changed: dict[int, Any], is_sound: bool) -> None:
    """Fault: a snapshot of no token, or of no byte, whose value is then beyond all others or divided by zero."""
    key = key_of("a", 48)
    key_position_bytes = [key, 48, 10]
    for column, value in changed.items():
        key_position_bytes[column] = value
    found, position, num_bytes = key_position_bytes
    row = (row_id(key), found, position, 7, 32, num_bytes, 1, 2.0, 3.0)
    if is_sound:
        assert entry_of(row) == Entry(*row[1:])
    else:
        with pytest.raises(IndexDamaged):
            entry_of(row)


def test_a_recount_is_made_from_the_rows(folder: Path) -> None:
    """Fault: after a check an ancestor counts as without children and goes first, or a wrong total stays."""
    parent, child = (key_of("a", position) for position in (16, 32))
    with closing(_index(folder)) as index:
        model = index.model_id(FINGERPRINT, None)
        for key, position, above in ((parent, 16, None), (child, 32, (parent, 16))):
            header = make_header(key, FINGERPRINT, position, above, arrays_of(key))
            index.insert(header, 10, model, 1.0)
        index.database.run("UPDATE snapshots SET children = 7")
        index.database.run("UPDATE totals SET entries = 9, bytes = 9")
        index.recount()
        counted = index.database.rows("SELECT children FROM snapshots ORDER BY position", (), is_count)
        assert counted == [(1,), (0,)] and index.totals() == (2, 20)


def test_reservations_are_listed_by_session_and_key(folder: Path) -> None:
    """Fault: the files of a killed process are looked for under other keys, or its bytes stay reserved."""
    with closing(_index(folder)) as index:
        index.reserve("s", [(key_of("a", 1), 5), (key_of("a", 2), 7)])
        index.reserve("t", [(key_of("b", 1), 1)])
        index.reserve("u", [])
        assert index.reserved_bytes() == 13
        assert index.reserved_keys() == [("s", key_of("a", 1)), ("s", key_of("a", 2)), ("t", key_of("b", 1))]
        index.release("s")
        assert index.reserved_bytes() == 1 and len(index.reserved_keys()) == 1


def _index(folder: Path) -> Index:
    folder.mkdir()
    index = Index(str(folder / INDEX_NAME))
    index.create(lambda: None)
    return index


def test_what_another_process_has_done_since_the_check_looked_stays(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a check that drops a snapshot which another process has stored since the check looked for its file, tells
    of a row that is gone by then, or enters a file that is."""
    exists, looked = SnapshotFolder.exists, list[bytes]()
    [key] = put_chain(store, "a", 1)
    store.flush()

    def comes_back(snapshots: SnapshotFolder, key: bytes) -> bool:
        looked.append(key)
        return len(looked) > 1 and exists(snapshots, key)

    def goes(*_: object) -> None:
        path_of(folder, key).unlink(missing_ok=True)

    def goes_with_its_row(snapshots: SnapshotFolder, key: bytes) -> bool:
        goes()
        execute(folder, "DELETE FROM snapshots")
        return False

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotFolder, "exists", comes_back)
        report = store.check()
    assert store.present([key]) == {key} and (report.faults, report.num_rows_dropped) == ([], 0)
    with monkeypatch.context() as patch:
        patch.setattr(SnapshotFolder, "exists", goes_with_its_row)
        report = store.check()
    assert store.present([key]) == set() and (report.faults, report.num_rows_dropped) == ([], 0)
    put_chain(store, "a", 1)
    store.flush()
    execute(folder, "DELETE FROM snapshots")
    with monkeypatch.context() as patch:
        patch.setattr(Index, "find", goes)  # it was evicted meanwhile
        report = store.check()
    assert store.present([key]) == set() and (report.faults, report.num_adopted) == ([], 0)
    put_chain(store, "a", 1)
    store.flush()
    goes()
    report = store.check()
    assert store.present([key]) == set() and report.num_rows_dropped == len(report.faults) == 1


def test_files_of_one_row_are_removed_and_no_others(store: Store, folder: Path) -> None:
    """Catches the file of another snapshot that goes with one whose row is damaged."""
    row = bytes(range(8))
    keys = [row + bytes(24), row + bytes([1] * 24), row[:7] + bytes([9] * 25)]
    for key in keys:
        store.put(key, 16, None, FINGERPRINT, arrays_of(key))
        store.flush()
        if key == keys[0]:  # its row has the id of the next one, of which there is a file too
            (path_of(folder, keys[1])).write_bytes(path_of(folder, key).read_bytes())
    assert SnapshotFolder(Files(), str(folder)).remove_namesakes(row + b"x" * 24) == 2
    assert [path_of(folder, key).exists() for key in keys] == [False, False, True]


def test_prune_of_nothing_in_particular_is_refused(store: Store) -> None:
    put_chain(store, "a", 2)
    with pytest.raises(UsageError, match="nothing says what to drop"):
        store.prune()
    with pytest.raises(UsageError, match="no model 'gpt'.*test model"):
        store.prune(model="gpt")
    assert store.stats().entries == 2


def test_a_clock_that_was_ahead_makes_nothing_immortal(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: after one run with the clock ahead, `prune --older-than` never dropped what it had used. It ages
    from the first prune on."""
    keys = put_chain(store, "a", 3)
    store.flush()
    execute(folder, "UPDATE snapshots SET last_used = last_used + 1e9 WHERE position > 16")
    execute(folder, "UPDATE snapshots SET last_used = 1e300 WHERE position > 32")
    assert store.stats().models[0].last_used <= time.time()
    assert store.prune(older_than_s=500).num_removed == 0
    now = time.time()
    monkeypatch.setattr("apcbatch.store.eviction.time.time", lambda: now + 1000)
    assert store.prune(older_than_s=500).num_removed == 3
    assert store.present(keys) == set()


def test_a_touch_puts_a_clock_right_again(store: Store, folder: Path) -> None:
    """Fault: a snapshot that is in use keeps the time of a clock that was ahead."""
    key = put_chain(store, "a", 1)[0]
    store.flush()
    execute(folder, "UPDATE snapshots SET last_used = 1e11")
    store.touch(key)
    store.flush()
    [[last_used]] = execute(folder, "SELECT last_used FROM snapshots")
    assert last_used <= time.time()


def test_check_mends_a_row_whose_key_is_wrong_in_one_go(store: Store, folder: Path) -> None:
    """Fault: the wrong row kept the right one out, so that a second check found a fault again."""
    keys = put_chain(store, "a", 3)
    store.flush()
    execute(folder, "UPDATE snapshots SET key = ? WHERE key = ?", keys[1][:31] + b"?", keys[1])
    report = store.check()
    assert (report.num_rows_dropped, report.num_adopted) == (1, 1)
    assert store.check().faults == [] and store.present(keys) == set(keys)


@table("options, num_left", [
    *(({"size_bytes": number}, 0 if number <= 0 else 3) for number in (10**400, 2**63, 0, -1, -(10**400))),
    *(({"older_than_s": age_s}, 0 if age_s <= 0 else 3)
      for age_s in (float("inf"), 1e300, 0.0, -1e300, -float("inf"))),
])  # fmt: skip
def test_prune_by_any_number(options: dict[str, Any], num_left: int, tmp_path: Path) -> None:
    """Fault: a size beyond what the index can hold, below nothing, or an age beyond every clock ends in a traceback."""
    with Store.open(tmp_path, warn=pytest.fail) as store:
        put_chain(store, "a", 3)
        assert store.prune(**options).num_left == num_left


def test_a_bad_file_that_cannot_be_read_again_stays(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a check that ends in an OSError, or removes what it could not read: a disk may fail for a moment."""
    key = put_chain(store, "a", 1)[0]
    store.flush()
    path_of(folder, key).write_bytes(b"nonsense")
    faults = iter([BadSnapshot("it is nonsense"), OSError("the disk is away")])

    def fails(*arguments: object) -> None:
        raise next(faults)

    monkeypatch.setattr(SnapshotFolder, "read", fails)
    report = store.check()
    assert [fault.endswith("it is nonsense") for fault in report.faults] == [True]
    assert (report.num_files_removed, next(faults, None)) == (0, None)
    assert path_of(folder, key).read_bytes() == b"nonsense" and store.present([key]) == {key}
