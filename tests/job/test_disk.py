"""Files that are written or replaced: where the new one is made, what is synced, and what stays open."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from apcbatch.job import disk as disk_module
from apcbatch.job.disk import BackgroundCall, Disk, remove_left_files, replacing, write_file
from apcbatch.job.sink import FileSink
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


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_file_is_replaced_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    """Fault: the new file is made on another file system, its name is not synced, or a descriptor stays open."""
    monkeypatch.chdir(tmp_path if is_relative else "/")
    path = "out" if is_relative else str(tmp_path / "out")
    disk, before, synced = WatchedDisk(), num_open(), list[str]()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
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
    """Fault: the file behind /dev/fd/N is replaced, and a process that holds it open finds nothing in it."""
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


def test_a_call_in_the_background_is_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: two pieces at a time, a failure without a warning, or one of a quick disk that shows seconds later."""
    release, work, order = threading.Event(), BackgroundCall(), list[str]()

    def fail() -> None:
        raise KeyError

    def slow() -> None:
        release.wait()
        order.append("slow")
        fail()

    with pytest.raises(KeyError):
        work.begin(fail)
    work.finish()
    work.begin(lambda: None)
    assert not work.is_busy
    monkeypatch.setattr(disk_module, "SHORT_CALL_S", 0.001)
    work.begin(slow)
    assert work.is_busy
    daemons = [thread.daemon for thread in threading.enumerate() if thread.name == "apcbatch-disk"]
    assert daemons == [True], "a process that ends early does not wait for it"
    threading.Timer(0.05, release.set).start()
    with pytest.raises(KeyError):
        work.begin(lambda: order.append("next"))
    work.finish()
    work.begin(lambda: order.append("next"))
    assert order == ["slow", "next"]


def test_lines_that_come_during_a_slow_sync_are_synced_at_the_end(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an engine waits for a slow disk, or a line is taken for safe because it came meanwhile."""
    monkeypatch.setattr("apcbatch.job.sink.SYNC_EVERY_S", 0.0)
    release, synced = threading.Event(), list[bytes]()

    class SlowDisk(Disk):
        def sync(self, fd: int) -> None:
            synced.append((tmp_path / "out").read_bytes())
            assert release.wait(5)

    sink = FileSink(tmp_path / "out", SlowDisk())
    sink.remove_if_unused = False
    for data in (b"1\n", b"2\n"):
        sink.append(data)
        sink.sync_if_due()
    assert synced == [b"1\n"], "the second one waits for the first"
    release.set()
    sink.finish(ordered=False)
    assert synced == [b"1\n", b"1\n2\n"]
    sink.close()
