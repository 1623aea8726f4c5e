"""Power cuts: what was not synced is gone, in part or as zeros, and the run continues from the rest."""

from __future__ import annotations

import contextlib
import json
import os
import random

import pytest

from apcbatch.job import disk as disk_module
from apcbatch.job import runfile, sink
from apcbatch.job.disk import Disk
from tests.chats import conversation, read_records, write_lines
from tests.effort import tries
from tests.job.conftest import answers

RUN = ("run", "in.jsonl", "-o", "sub/out.jsonl", "--max-tokens", 2, "--max-running", 2, "--progress", "none", "-q")


class PowerCut(BaseException):
    """The machine stops."""


class CutDisk(Disk):
    """A disk that stops at a given call, and tells then what a real one might hold. Names and contents reach the
    platter when they are synced; each by itself may, before that."""

    left = 0  # calls until the cut
    is_cut = False
    synced: dict[int, bytes]  # content by inode
    names: dict[str, int | None]  # inode by path, as the folder was synced
    now: dict[str, int | None]
    kept: list[int] = []  # open descriptors, so that the number of a removed file is not given to another

    @classmethod
    def begin(cls, folder, left: int = 0) -> None:
        """Start with what the folder holds, all of it safe."""
        files = {str(path): path for path in folder.iterdir()}
        cls.names = {name: path.stat().st_ino for name, path in files.items()}
        cls.synced = {path.stat().st_ino: path.read_bytes() for path in files.values()}
        cls.left, cls.is_cut, cls.now = left, False, dict(cls.names)
        while cls.kept:
            os.close(cls.kept.pop())
        cls.kept.extend(os.open(path, os.O_RDONLY) for path in files)

    def _count(self) -> None:
        cls = type(self)
        cls.left -= 1
        if cls.left == 0:
            cls.is_cut = True
            raise PowerCut

    def open(self, path, flags):
        self._count()
        fd = super().open(path, flags)
        inode = os.fstat(fd).st_ino
        self.kept.append(os.open(path, os.O_RDONLY))
        self.synced.setdefault(inode, b"")
        self.now[path] = inode
        return fd

    def write(self, fd, data):
        self._count()
        super().write(fd, data)

    def truncate(self, fd, size):
        self._count()
        super().truncate(fd, size)

    def sync(self, fd):
        self._count()
        super().sync(fd)
        self.synced[os.fstat(fd).st_ino] = os.pread(fd, 1 << 24, 0)

    def rename(self, source, target):
        self._count()
        super().rename(source, target)
        self.now[target] = self.now.pop(source)
        self.now[source] = None

    def unlink(self, path):
        if not self.is_cut:  # what is removed after the cut never reached the disk
            self._count()
            self.now[path] = None
        super().unlink(path)

    def sync_folder(self, folder):
        self._count()
        super().sync_folder(folder)
        self.names.update(self.now)

    @classmethod
    def platter(cls, folder) -> None:
        """Make the folder what the disk might hold after the cut."""
        contents = {path.stat().st_ino: path.read_bytes() for path in folder.iterdir()}
        held: dict[str, bytes] = {}
        for path in cls.names | cls.now:
            known = [cls.names.get(path), cls.now.get(path)]
            inode = random.choice(known)
            if inode is not None:
                held[path] = after_the_cut(cls.synced[inode], contents.get(inode, cls.synced[inode]))
        for path in folder.iterdir():
            path.unlink()
        for path, content in held.items():
            with open(path, "wb") as file:
                file.write(content)


def after_the_cut(synced: bytes, written: bytes) -> bytes:
    """The synced bytes, and behind them any part of what was written since, a stretch of it perhaps as zeros."""
    if not written.startswith(synced):
        return random.choice([synced, written])
    end = random.randint(len(synced), len(written))
    hole = sorted(random.choices(range(len(synced), end + 1), k=2))
    if random.random() < 0.5:
        return written[:end]
    return written[: hole[0]] + b"\0" * (hole[1] - hole[0]) + written[hole[1] : end]


@pytest.fixture
def cut(monkeypatch):
    """Every disk of a run is cut; the folders that it syncs are those of the outputs."""
    for module in (sink, runfile, disk_module):
        if hasattr(module, "Disk"):
            monkeypatch.setattr(module, "Disk", CutDisk)
    monkeypatch.setattr(sink, "SYNC_EVERY_S", 0.0)


@pytest.mark.parametrize("number", range(tries(40)))
def test_a_run_goes_on_after_power_cuts(apcbatch, tmp_path, cut, number):
    """Fault: a synced line is lost, a torn one stays, OUT stands beside another run's file, or cannot be resumed."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(4)])
    folder = tmp_path / "sub"
    folder.mkdir()
    CutDisk.begin(folder)
    overwriting = number % 2
    if overwriting:
        assert apcbatch(*RUN, "--seed", 1).code == 0
    out = folder / "out.jsonl"
    how = ["--overwrite"] if overwriting else []
    for _ in range(3):
        CutDisk.begin(folder, left=random.randint(1, 24))
        with contextlib.suppress(PowerCut):
            assert apcbatch(*RUN, *how).code == 0
        synced = CutDisk.synced.get(CutDisk.names.get(str(out)), b"")  # none if OUT's name is not safe
        safe = {one for one in synced.splitlines(keepends=True) if one.endswith(b"\n") and b"\0" not in one}
        CutDisk.platter(folder)
        if out.exists():
            how = ["--overwrite"] if run_seed(folder) else ["--resume"]
        if run_seed(folder) == 0:
            assert safe <= set(out.read_bytes().splitlines(keepends=True)), "a synced line is gone"
    CutDisk.begin(folder)
    assert apcbatch(*RUN, *how).code == 0
    assert len(answers(read_records(out))) == 8 and run_seed(folder) == 0


def run_seed(folder):
    """The seed that the run file names; None without one. A run file is whole or not there."""
    path = folder / "out.jsonl.run.json"
    return json.loads(path.read_bytes())["config"]["seed"] if path.exists() else None


def test_lines_are_synced_every_few_seconds_and_at_the_end(apcbatch, tmp_path, cut, monkeypatch):
    """Fault: no line is safe from a power cut before the end, or OUT's name is not."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(4)])
    (tmp_path / "sub").mkdir()
    CutDisk.begin(tmp_path / "sub")
    done = []
    sync = CutDisk.sync

    def watched(self, fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/out.jsonl"):
            done.append(os.fstat(fd).st_size)
        sync(self, fd)

    monkeypatch.setattr(CutDisk, "sync", watched)
    assert apcbatch(*RUN).code == 0
    size = (tmp_path / "sub" / "out.jsonl").stat().st_size
    assert len([synced for synced in done if 0 < synced < size]) > 2 and done[-1] == size
    assert str(tmp_path / "sub" / "out.jsonl") in CutDisk.names, "the folder was synced"
    assert str(tmp_path / "sub" / "out.jsonl.run.json") in CutDisk.names
