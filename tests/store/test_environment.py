"""The store's one seam to the disk: what each call does, and what it refuses."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

import pytest

from apcbatch.store import environment
from apcbatch.store.environment import FileReader, Files
from tests.effort import table

FILES = Files()


def test_what_is_written_durably_is_on_the_disk_and_so_is_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: after a power cut the file is there and empty, or its name is not; or the end of an older, longer content
    stays, or a descriptor stays open."""
    synced: list[tuple[Path, bytes]] = []

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path, path.read_bytes() if path.is_file() else b"folder"))

    monkeypatch.setattr(environment.os, "fsync", sync)
    before = len(os.listdir("/proc/self/fd"))
    path = tmp_path / "id"
    for data in (b"a longer text", b"text"):
        FILES.write_durably(str(path), data)
        assert path.read_bytes() == data
    assert synced == [(path, b"a longer text"), (tmp_path, b"folder"), (path, b"text"), (tmp_path, b"folder")]
    monkeypatch.setattr(environment.os, "pwrite", lambda *_: 3)
    with pytest.raises(OSError, match="No space left") as raised:
        FILES.write_durably(str(path), b"some text")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))
    assert len(os.listdir("/proc/self/fd")) == before


@table("most", [1, 3, 7, 1 << 20])
def test_chunks_are_written_whole_however_little_the_system_takes(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a write that the system cuts short leaves a gap, or the bytes behind the cut are written twice; more
    chunks than the system takes at once end in an error."""
    takes = os.writev

    def write(descriptor: int, views: list[memoryview]) -> int:
        assert 0 < len(views) <= 64 and all(len(view) for view in views)
        return takes(descriptor, [b"".join(views)[:most]])

    monkeypatch.setattr(environment.os, "writev", write)
    chunks = [bytes([number]) * (number % 5) for number in range(200)]
    path = tmp_path / "new"
    FILES.write(str(path), chunks)
    assert path.read_bytes() == b"".join(chunks)
    with pytest.raises(FileExistsError):
        FILES.write(str(path), [b"other"])
    FILES.write(str(tmp_path / "empty"), [])
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_read_goes_on_where_the_system_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a short read is taken for the file's end, or its bytes are put in the place of others."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    reads = os.preadv
    monkeypatch.setattr(environment.os, "preadv", lambda fd, buffers, at: reads(fd, [buffers[0][:7]], at))
    before = os.listdir("/proc/self/fd")
    with FileReader(str(path)) as reader:
        assert reader.size == 100
        for offset, length, count in ((0, 100, 100), (30, 20, 20), (90, 20, 10), (100, 5, 0), (3, 0, 0)):
            buffer = bytearray(length)
            assert reader.read_into(offset, memoryview(buffer)) == count
            assert bytes(buffer) == bytes(range(offset, offset + count)) + bytes(length - count)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_only_plain_files_and_folders_are_what_they_are_called(tmp_path: Path) -> None:
    """Fault: a link or a pipe in the store's folder is followed, or waited for."""
    file, folder, link, pipe = (tmp_path / name for name in ("file", "folder", "link", "pipe"))
    file.write_bytes(b"12345")
    folder.mkdir()
    link.symlink_to(file)
    os.mkfifo(pipe)
    kinds = [FILES.kind(str(path)) for path in (file, folder, link, pipe, tmp_path / "none")]
    assert kinds == ["file", "folder", "other", "other", None]
    before = len(os.listdir("/proc/self/fd"))
    for path in (folder, link, pipe):
        with pytest.raises(OSError, match="not a plain file|symbolic links"):
            FILES.open(str(path))
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError, match="symbolic links"):
        FILES.touch(str(link))
    assert FILES.exists(str(link)) and not FILES.exists(str(tmp_path / "none"))
    assert (FILES.size(str(file)), FILES.size(str(link))) == (5, len(str(file)))
    assert FILES.is_folder(str(folder)) and not FILES.is_folder(str(file))
    assert FILES.names(str(tmp_path)) == ["file", "folder", "link", "pipe"] and FILES.names(str(tmp_path / "no")) == []
    (folder / "inside").write_bytes(b"")
    with pytest.raises(OSError, match="."):
        FILES.names(str(link))
    FILES.touch(str(file))
    FILES.touch(str(tmp_path / "new"))
    assert file.read_bytes() == b"12345" and FILES.size(str(tmp_path / "new")) == 0
    os.utime(file, (1.5, 2.5))
    assert FILES.modified(str(file)) == 2.5
    FILES.rename(str(file), str(tmp_path / "new"))
    assert (tmp_path / "new").read_bytes() == b"12345"
    assert FILES.unlink(str(tmp_path / "new")) and not FILES.unlink(str(tmp_path / "new"))


def test_folders_are_made_with_their_parents_or_not_at_all(tmp_path: Path) -> None:
    """Fault: a folder under one that is missing is an error, one that is there is too, or one in a file is not."""
    deep = tmp_path / "a" / "b" / "c"
    for _ in range(2):
        FILES.make_folders(str(deep))
        assert deep.is_dir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileExistsError):
        FILES.make_folders(str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError):
        FILES.make_folders(str(tmp_path / "file" / "below"))
    with pytest.raises(FileNotFoundError):
        FILES.make_folders("/proc/none")


@table(
    "mode, of_files, of_folders",
    [(0o600, 0o600, 0o700), (0o640, 0o640, 0o750), (0o660, 0o660, 0o770), (0o644, 0o644, 0o755), (0o777, 0o666, 0o777)],
)
def test_new_files_follow_the_mode_of_one(mode: int, of_files: int, of_folders: int, tmp_path: Path) -> None:
    """Fault: a user who may read a store cannot search its new folders, or every user can."""
    model = tmp_path / "model"
    model.write_bytes(b"")
    model.chmod(mode)
    umask = os.umask(0)
    try:
        files = Files()
        files.follow_mode(str(tmp_path / "none"))
        files.follow_mode(str(tmp_path))
        assert files.mode == 0o600
        files.follow_mode(str(model))
        files.make_folders(str(tmp_path / "folder"))
        for number, make in enumerate((files.touch, lambda path: files.write(path, []),
                                       lambda path: files.write_durably(path, b""))):  # fmt: skip
            make(str(tmp_path / f"{number}"))
            assert stat.S_IMODE((tmp_path / f"{number}").stat().st_mode) == of_files
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == of_folders


def test_a_lock_has_one_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: two processes mend one store at once, one waits for ever, or not for as long as it was told to."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    path, before = str(tmp_path / "lock"), len(os.listdir("/proc/self/fd"))
    held = FILES.lock(path, 0.0)
    assert held is not None
    for wait_s in (0.0, 0.5):
        clock[0] = 0.0
        assert FILES.lock(path, wait_s) is None
        assert wait_s <= clock[0] <= wait_s + 0.02
    held.close()
    again = FILES.lock(path, 0.0)
    assert again is not None
    again.close()

    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(OSError, match="no locks"):
        FILES.lock(path, 0.0)
    assert len(os.listdir("/proc/self/fd")) == before
