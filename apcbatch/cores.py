"""Find the cores and the memory that this process may use, their name, and settings of the machine that slow a run
down.

A limit that the system does not report counts as absent.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cores:
    """Processors available to this process, and related settings of the system.

    logical: number of processors the process may run on. physical: number of their cores, hyper-threads counted once.
    quota: CPU time limit of its control group, in processors; None for no limit. nodes: number of NUMA nodes of the
    processors. huge_pages: the system's setting for transparent huge pages; None if unknown.
    """

    logical: int
    physical: int
    quota: float | None
    nodes: int
    huge_pages: str | None

    @property
    def threads(self) -> int:
        """Fastest number of threads: one per core, at most the quota."""
        return self.physical if self.quota is None else max(1, min(self.physical, int(self.quota)))

    def advice(self, threads: int) -> str | None:
        """Return what is wrong with running this number of threads, and how to fix it; None if nothing is wrong."""
        fix = f"give --threads {self.threads}"
        if threads > self.logical:
            return f"{threads} threads share {self.logical} processors and wait for one another: {fix}"
        if self.quota is not None and threads > max(1, self.quota):
            quota = f"a quota of {self.quota:g} processors"
            return f"{threads} threads share {quota} and are stopped when it is used up: {fix}"
        if self.nodes > 1 and threads > self.physical // self.nodes:
            return (
                f"the cores belong to {self.nodes} NUMA nodes, and every thread reads all weights: run one process a "
                "node, as `numactl -N 0 -m 0 apcbatch run ...`, each with its part of the input"
            )
        if self.huge_pages == "never":
            return (
                "memory in huge pages is switched off, which costs large models some speed: ask for `madvise` in "
                "/sys/kernel/mm/transparent_hugepage/enabled"
            )
        return None


def find_cores(root: Path = Path("/")) -> Cores:
    """Find the cores of this process. root: parent folder of `sys` and `proc`."""
    ours = os.sched_getaffinity(0)
    devices = root / "sys/devices/system"
    siblings = {_read(devices / f"cpu/cpu{one}/topology/thread_siblings_list") or str(one) for one in ours}
    nodes = [_processors(_read(node / "cpulist")) for node in sorted(devices.glob("node/node[0-9]*"))]
    return Cores(
        logical=len(ours),
        physical=len(siblings),
        quota=_quota(root),
        nodes=max(1, sum(bool(node & ours) for node in nodes)),
        huge_pages=_chosen(_read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
    )


def processor_name(root: Path = Path("/")) -> str:
    """Return the processor's name, as the system reports it. root: as in `find_cores`."""
    lines = _read(root / "proc/cpuinfo").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def find_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the machine's, or the limit of its control group if that is
    less. root: parent folder of `sys` and `proc`."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = [_read(folder / name) for folder in _groups(root, "memory") for name in names]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(int(text) for text in texts if text.isdecimal())])


def may_have_gpu(root: Path = Path("/")) -> bool:
    """Return whether NVIDIA's driver, or WSL's, offers a device; torch, which takes seconds to load, tells which."""
    return any((root / "dev" / name).exists() for name in ("nvidiactl", "dxg"))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _processors(text: str) -> set[int]:
    """Parse a list of processor numbers such as `0-3,8`. Malformed text gives an empty set."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _chosen(text: str) -> str | None:
    """Return the word in brackets in a text such as `always [madvise] never`."""
    begin, end = text.find("["), text.find("]")
    return text[begin + 1 : end] if 0 <= begin < end else None


def _quota(root: Path) -> float | None:
    """Return the smallest CPU limit of the process's control group and its ancestors, for cgroup v1 and v2."""
    known = [limit for folder in _groups(root, "cpu") if (limit := _limit(folder)) is not None]
    return min(known, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's control group and its ancestors, for cgroup v1 and v2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        base = root / "sys/fs/cgroup"
        if controllers and controller not in controllers.split(","):
            continue
        base = base / controllers if controllers else base
        own = base / name.lstrip("/")
        for folder in [own, *own.parents]:
            yield folder
            if folder == base:
                break
        yield base


def _limit(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(quota) / int(period)
