"""The cores that a process may use, on machines that are made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from apcbatch.cores import Cores, find_cores, find_memory, may_have_gpu
from tests.effort import table

EIGHT = set(range(8))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def siblings(*groups: str) -> dict[str, str]:
    """Processors by core, as 0-1 or 0,4."""
    return {
        f"sys/devices/system/cpu/cpu{one}/topology/thread_siblings_list": group
        for group in groups
        for one in group.replace("-", ",").split(",")
    }


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The processors that the process may run on."""
    processors = set(EIGHT)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: processors)
    return processors


def test_a_machine_that_says_nothing_has_no_limits(ours: set[int], tmp_path: Path) -> None:
    """Catches a file that is not there taken for a limit of none."""
    cores = find_cores(tmp_path)
    assert cores == Cores(logical=8, physical=8, quota=None, nodes=1, huge_pages=None)
    assert cores.threads == 8 and cores.advice(8) is None


def test_siblings_count_once(ours: set[int], tmp_path: Path) -> None:
    """Catches two threads on one core, and a core that is left out because one of its processors is not ours."""
    write(tmp_path, siblings("0-1", "2-3", "4-5", "6-7"))
    assert (find_cores(tmp_path).physical, find_cores(tmp_path).threads) == (4, 4)
    ours -= {1, 2, 4, 5}
    assert (find_cores(tmp_path).logical, find_cores(tmp_path).physical) == (4, 3)


@table("files, quota, threads", [
    ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "max 100000"}, None, 8),
    ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "350000 100000"}, 3.5, 3),
    ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5, 1),
    ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "1600000 100000"}, 16.0, 8),
    ({"proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job",
      "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000",
      "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, 2.0, 2),
    ({"proc/self/cgroup": "4:cpu:/job", "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1",
      "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000"}, None, 8),
    ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "nonsense"}, None, 8),
])  # fmt: skip
def test_the_quota_of_a_container(
    ours: set[int], files: dict[str, str], quota: float | None, threads: int, tmp_path: Path
) -> None:
    """Catches threads that the system stops for most of each period, in both versions of control groups."""
    write(tmp_path, files)
    assert (find_cores(tmp_path).quota, find_cores(tmp_path).threads) == (quota, threads)


@table("files, limit", [
    ({}, 1 << 40),
    ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/memory.max": "9", "sys/fs/cgroup/memory.max": "max"}, 9),
    ({"proc/self/cgroup": "4:cpu:/x\n3:memory:/job", "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "77",
      "sys/fs/cgroup/cpu/x/memory.limit_in_bytes": "5"}, 77),
    ({"proc/self/cgroup": "3:memory:/x", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{(1 << 63) - 4096}"},
     1 << 40),
])  # fmt: skip
def test_the_memory_of_a_container(
    files: dict[str, str], limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a run plans with the machine's memory and is killed at its container's limit, in both versions of control
    groups."""
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 1 << 28, "SC_PAGE_SIZE": 1 << 12}[name])
    write(tmp_path, files)
    assert find_memory(tmp_path) == limit


def test_what_is_wrong_is_said(ours: set[int], tmp_path: Path) -> None:
    """Catches advice for a machine that needs none, and none for one that does."""
    node = "sys/devices/system/node/node{}/cpulist"
    write(tmp_path, {node.format(0): "0-3", node.format(1): "4-7"})
    write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"})
    cores = find_cores(tmp_path)
    assert "give --threads 8" in str(cores.advice(9))
    assert "2 NUMA nodes" in str(cores.advice(5))
    assert "huge pages is switched off" in str(cores.advice(4))
    ours -= {4, 5, 6, 7}
    assert find_cores(tmp_path).nodes == 1
    assert "quota of 2 processors" in str(Cores(8, 8, 2.0, 1, None).advice(3))
    assert Cores(8, 8, 2.0, 1, "madvise").advice(2) is None


def test_this_machine() -> None:
    """Catches a real system whose files are written in another way."""
    cores = find_cores()
    assert 1 <= cores.threads <= cores.physical <= cores.logical == len(os.sched_getaffinity(0))


def test_a_driver_is_looked_for(tmp_path: Path) -> None:
    """Fault: torch is loaded for seconds where no GPU can be, or a card is overlooked."""
    (tmp_path / "dev").mkdir()
    assert not may_have_gpu(tmp_path)
    (tmp_path / "dev/nvidiactl").touch()
    assert may_have_gpu(tmp_path)
