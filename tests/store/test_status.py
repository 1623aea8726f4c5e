"""What an open store says, how often, and what it counts."""

from __future__ import annotations

import errno
from contextlib import closing
from dataclasses import astuple
from pathlib import Path

import pytest

from apcbatch.store import Store
from apcbatch.store.database import IndexDamaged, IndexFault
from apcbatch.store.environment import Files
from apcbatch.store.format import INDEX_NAME, SUSPECT_NAME
from apcbatch.store.index import Index
from apcbatch.store.status import MAX_BAD_SNAPSHOT_LINES, Status, StoreCounters
from tests.effort import table
from tests.store.conftest import put_chain


@table("error, sentence, leaves_a_mark", [
    (OSError(errno.ENOSPC, "No space left"), "the disk is full; snapshots are not kept (results do not", False),
    (OSError(errno.EIO, "bad sector"), "reading failed ([Errno 5] bad sector); the run continues without it", False),
    (IndexFault("database or disk is full"), "the disk is full; snapshots are not kept", False),
    (IndexFault("database is locked"), "reading failed (database is locked); the run continues without it", False),
    (IndexDamaged("it is full of noise"), "the index is damaged (it is full of noise); the run continues", True),
])  # fmt: skip
def test_each_error_is_told_once_for_what_it_is(
    error: OSError | IndexFault, sentence: str, leaves_a_mark: bool, tmp_path: Path
) -> None:
    """Catches a damaged index that the next process trusts, a sound one that it makes anew, a full disk that is taken
    for a broken one, and a line for every snapshot."""
    lines: list[str] = []
    status = Status(lines.append, str(tmp_path), Files())
    for _ in range(3):
        status.failure(error, "reading")
    assert len(lines) == 1 and lines[0].startswith(f"store {tmp_path}: {sentence}")
    assert (tmp_path / SUSPECT_NAME).exists() is leaves_a_mark
    status.failure(OSError(errno.EROFS, "read-only"), "writing")
    status.failure(OSError(errno.EROFS, "read-only"), "naming")
    assert len(lines) == 2 and "writing failed" in lines[1], "another cause"


def test_where_nothing_may_be_changed_no_mark_is_left(tmp_path: Path) -> None:
    """Catches a store that was opened to be read, and is written to; and a disk that refuses the mark."""
    lines: list[str] = []
    Status(lines.append, str(tmp_path), None).failure(IndexDamaged("noise"), "reading")
    assert len(lines) == 1 and not list(tmp_path.iterdir())
    Status(lines.append, str(tmp_path / "gone"), Files()).failure(IndexDamaged("noise"), "reading")
    assert len(lines) == 2


def test_bad_snapshots_are_listed_up_to_a_bound() -> None:
    """Catches a page of warnings, one that stops without a word, and bad files that are not counted."""
    lines: list[str] = []
    status = Status(lines.append, "a store", None)
    for number in range(MAX_BAD_SNAPSHOT_LINES + 3):
        status.bad_snapshot(bytes([number]) * 32, "it is torn")
    assert len(lines) == MAX_BAD_SNAPSHOT_LINES + 1 and status.counters.bad == MAX_BAD_SNAPSHOT_LINES + 3
    assert lines[1] == f"store a store: snapshot {'01' * 32} is not used: it is torn; it is computed again"
    assert lines[-1].endswith("more bad snapshots are not listed; run: apcbatch store check 'a store'")


def test_what_a_store_holds_is_nothing_where_that_cannot_be_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a progress line that ends the run because the index is damaged."""
    put_chain(store, "a", 2)
    store.flush()
    entries, num_bytes = store.held
    assert entries == 2 and num_bytes > 0

    def fail(index: Index) -> tuple[int, int]:
        raise IndexDamaged("noise")

    monkeypatch.setattr(Index, "totals", fail)
    assert store.held == (0, 0)


def test_a_row_is_removed_once(store: Store, folder: Path) -> None:
    """Catches a loop over the rows that continues for ever, as nothing of what it finds can be removed."""
    [key] = put_chain(store, "a", 1)
    store.flush()
    with closing(Index(str(folder / INDEX_NAME))) as index:
        entry = index.find(key)
        assert entry is not None
        with index.transaction():
            index.remove(entry)
            with pytest.raises(IndexDamaged, match="a row that was found cannot be removed"):
                index.remove(entry)


def test_counters_add_up_and_are_copies() -> None:
    """Catches a skipped snapshot that is left out of the sum, one that was stored and is in it, and counters that
    change under their reader."""
    status = Status(print, "", None)
    before = status.counters
    status.count(written=1, skipped_full_queue=2, skipped_no_room=30)
    status.count(skipped_stranded=400, failed=5000, duplicates=7, evicted=8, skipped_no_room=60)
    assert before == StoreCounters() and not any(astuple(before))
    assert (status.counters.skipped, status.counters.skipped_no_room) == (5492, 90)
