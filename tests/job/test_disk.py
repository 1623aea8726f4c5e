"""Files that are written or replaced: where the new one is made, what is synced, and what stays open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from apcbatch.job.disk import Disk, identity, remove_left_files, replacing, write_file
from tests.job.conftest import killed_while_it_writes


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


class WatchedDisk(Disk):
    """Notes the paths of new files."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def open(self, path: str, flags: int) -> int:
        self.opened.append(path)
        return super().open(path, flags)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was synced, as it was called then."""
    names: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: names.append(os.readlink(f"/proc/self/fd/{fd}")))
    return names


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_file_is_replaced_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str], is_relative: bool
) -> None:
    """Fault: the new file is made on another file system, its name is not synced, or a descriptor stays open."""
    monkeypatch.chdir(tmp_path if is_relative else "/")
    path = "out" if is_relative else str(tmp_path / "out")
    disk, before = WatchedDisk(), num_open()
    with replacing(path, disk) as fd:
        disk.write(fd, b"new")
    [made] = disk.opened
    assert os.path.dirname(os.path.abspath(made)) == str(tmp_path) and os.listdir(tmp_path) == ["out"]
    assert synced == [os.path.abspath(made), str(tmp_path)] and num_open() == before
    with pytest.raises(KeyError), replacing(path, disk):
        raise KeyError
    assert (tmp_path / "out").read_bytes() == b"new" and os.listdir(tmp_path) == ["out"] and num_open() == before


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path: Path) -> None:
    """Fault: a file system that cannot sync a folder ends the run, or each try leaves the folder open."""
    before = num_open()
    Disk().sync_folder(str(tmp_path / "gone"))
    Disk().sync_folder(str(tmp_path))
    assert num_open() == before


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    """Fault: OUT can be executed, or a colleague who may read other files may not read it."""
    (tmp_path / "other").touch()
    os.close(Disk().open(str(tmp_path / "out"), 0))
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_the_file_behind_a_descriptor_is_written_where_it_is(tmp_path: Path) -> None:
    """Fault: the file behind /dev/fd/N is replaced, and whoever holds it open finds nothing in it."""
    with open(tmp_path / "out", "wb") as file:
        file.write(b"old ")
        file.flush()
        write_file(f"/dev/fd/{file.fileno()}", [b"and ", b"new"], Disk())
        assert os.fstat(file.fileno()).st_size == 11
    assert (tmp_path / "out").read_bytes() == b"old and new"


def test_only_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Fault: a kill leaves a temporary file beside OUT for good; or one that a living run writes, one of another file,
    a link or a file of the user's goes with it."""
    left = []
    for name in ("out", "other"):
        killed_while_it_writes(tmp_path / name)
        left += {path.name for path in tmp_path.iterdir()} - {*left}
    out, other = (tmp_path / name for name in left)
    link = out.with_name(out.name[:-20] + "0" * 16 + ".tmp")
    link.symlink_to(other)
    for name in (f"{out.name}.bak", f"x{out.name}", ".apcbatch-mine.tmp"):
        (tmp_path / name).touch()
    out.with_name(out.name[:-20] + "1" * 16 + ".tmp").mkdir()
    kept = {path.name for path in tmp_path.iterdir()} - {out.name}
    with replacing(str(tmp_path / "out"), Disk()) as fd:
        written = {path.name for path in tmp_path.iterdir()} - kept - {out.name}
        remove_left_files([str(tmp_path / "out"), str(tmp_path / "gone" / "out")])
        assert {path.name for path in tmp_path.iterdir()} == kept | written and len(written) == 1
        os.write(fd, b"new")
    assert (tmp_path / "out").read_bytes() == b"new" and {path.name for path in tmp_path.iterdir()} == kept | {"out"}


def test_no_file_has_no_identity(tmp_path: Path) -> None:
    """Fault: a name that no file has ends the run."""
    assert identity(tmp_path / "gone") is identity("a\0b") is None
    assert identity(tmp_path) is not None
