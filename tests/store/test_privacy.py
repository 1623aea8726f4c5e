"""Who may read a store: its owner alone, unless the owner opened it to others."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from apcbatch.store import Store
from apcbatch.store.format import INDEX_NAME
from tests.store.conftest import put_chain


@pytest.fixture(params=[0o000, 0o022, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """The permissions of a folder and of everything in it, by relative path."""
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in [folder, *folder.rglob("*")]}


def test_a_new_store_is_its_owners_alone(tmp_path: Path, umask: int) -> None:
    """Fault: folders and files follow the umask, so that on most machines everybody could read the states of
    everybody's prompts."""
    folder = tmp_path / "new" / "store"
    with Store.open(folder, warn=pytest.fail) as store:
        put_chain(store, "a", 3)
        store.flush()
        found = modes(folder)
    assert {"index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "store.lock", "tmp", "objects"} <= set(found)
    assert sum(name.endswith(".safetensors") for name in found) == 3
    wrong = {name: oct(mode) for name, mode in found.items() if mode != (0o700 if (folder / name).is_dir() else 0o600)}
    assert not wrong


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    """Fault: a shared folder is closed to those who share it. What is made in it is the owner's all the same."""
    os.chmod(tmp_path, 0o755)
    with Store.open(tmp_path, warn=pytest.fail) as store:
        put_chain(store, "a", 1)
    found = modes(tmp_path)
    assert found.pop(".") == 0o755
    assert {mode & 0o077 for mode in found.values()} == {0}


def test_an_opened_store_stays_open(tmp_path: Path) -> None:
    """Fault: the owner lets a group use a store, and its next snapshots are the owner's alone again."""
    before = os.umask(0o007)
    try:
        folder = tmp_path / "store"
        with Store.open(folder, warn=pytest.fail) as store:
            put_chain(store, "a", 1)
        old = modes(folder)
        os.chmod(folder / INDEX_NAME, 0o660)
        with Store.open(folder, warn=pytest.fail) as store:
            put_chain(store, "b", 1)
        new = {name: mode for name, mode in modes(folder).items() if name not in old}
    finally:
        os.umask(before)
    assert new
    assert {mode & 0o777 for name, mode in new.items() if name.endswith(".safetensors")} == {0o660}
    assert {mode for name, mode in new.items() if (folder / name).is_dir()} <= {0o770}
