"""What is refused when a store is opened: newer formats, other programs' files, folders without a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from apcbatch.errors import UsageError
from apcbatch.store import Store, environment
from apcbatch.store.format import FORMAT_VERSION
from apcbatch.store.index import Index
from tests.effort import table
from tests.store.conftest import execute


def test_a_newer_store_is_refused(folder: Path, warnings: list[str]) -> None:
    """An old program must not evict or misread what a new one has written."""
    Store.open(folder, warn=warnings.append).close()
    execute(folder, "UPDATE meta SET value = ?", FORMAT_VERSION + 1)
    for read_only in (False, True):
        with pytest.raises(UsageError, match=f"store format {FORMAT_VERSION + 1}.*newer apcbatch"):
            Store.open(folder, warn=warnings.append, read_only=read_only)


def test_an_index_that_cannot_be_used_is_closed_again(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a database that stays open, and its file in use, until Python happens to collect it."""
    Store.open(folder, warn=warnings.append).close()
    execute(folder, "DELETE FROM meta")
    opened, closed = [], []
    begin, end = Index.__init__, Index.close

    def note(index: Index, *arguments: str) -> None:
        begin(index, *arguments)
        opened.append(index)

    monkeypatch.setattr(Index, "__init__", note)
    monkeypatch.setattr(Index, "close", lambda index: (closed.append(index), end(index)))
    Store.open(folder, warn=warnings.append, read_only=True).close()
    assert opened and closed == opened and len(warnings) == 1

    def fail(*_: object) -> None:
        raise OSError("no room for a session")

    monkeypatch.setattr("apcbatch.store.folder.Session", fail)
    opened.clear()
    closed.clear()
    with Store.open(folder, warn=warnings.append) as store:
        assert store.is_read_only and "no room for a session" in warnings[-1]
        assert len(opened) >= 3 and len(set(opened) - set(closed)) == 1, "the one that is read from"
    assert set(opened) == set(closed)


@table("kind, is_network", [
    *((kind, True) for kind in ("nfs4", "nfs", "cifs", "smb3", "lustre", "ceph", "fuse.sshfs", "fuse")),
    *((kind, False) for kind in ("ext4", "overlay", "tmpfs", "xfs", "fuseblk", "fuse.fuse-overlayfs")),
])  # fmt: skip
def test_a_store_on_a_network_file_system_is_warned_of(
    kind: str, is_network: bool, tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches hosts that break one another's index without a word, and a word about a local disk."""
    device = os.stat(tmp_path).st_dev
    here = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"22 27 0:21 / /a\\040b rw,relatime shared:5 - proc proc rw\n"
        f"36 35 {here} /x /y rw,noatime master:1 - {kind} host:/export rw,vers=4.2\n"
    )
    monkeypatch.setattr(environment, "MOUNTS", str(mounts))
    for read_only in (False, True):
        warnings.clear()
        Store.open(tmp_path / "store", warn=warnings.append, read_only=read_only).close()
        told = [line for line in warnings if f"is on {kind}, and SQLite's log is safe on one host alone" in line]
        assert told == (warnings if is_network else []) and len(warnings) == is_network


@pytest.mark.parametrize("mounts", ["", "/nowhere/mountinfo"])
def test_a_mount_table_that_says_nothing_is_no_warning(
    mounts: str, folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a store that cannot be opened where /proc is another one's, or hides the mounts."""
    monkeypatch.setattr(environment, "MOUNTS", mounts or os.devnull)
    Store.open(folder, warn=warnings.append).close()
    assert not warnings
