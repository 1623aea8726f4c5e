"""How many workers of which size a cluster is asked for.

Must not know: Ray, where workers run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apcbatch.cluster.seam import WorkerKind
from apcbatch.errors import UsageError

NEARLY_ALL = 0.9


@dataclass(frozen=True, slots=True)
class Machine:
    """cpus: cores for workers, 0 for a head that only manages."""

    cpus: int
    gpus: int = 0


def workers_for(
    machines: Sequence[Machine],
    num_workers: int | None,
    cpus: int | None,
    gpus: int | None,
    memory_bytes: int | None,
) -> tuple[int, WorkerKind]:
    """How many workers to ask for, and of which size. None is what is best for the machines that are there now: a
    worker for each GPU, or else, where all machines are alike, one for each with all its cores; where more workers are
    asked for, as many cores as let all run."""
    if gpus is None:
        gpus = int(any(machine.gpus for machine in machines))
    if num_workers is None and not _room(machines, 1, gpus):
        what = "a core for workers" if not gpus else "a GPU" if gpus == 1 else f"{gpus} GPUs"
        raise UsageError(f"no machine of the cluster has {what} yet; give --workers and --worker-cpus")
    if cpus is None:
        cpus = _best_cpus(machines, num_workers, gpus)
    if num_workers is None:
        num_workers = _room(machines, cpus, gpus)
        if not num_workers:
            raise UsageError(f"no machine of the cluster has {cpus} cores; give fewer --worker-cpus, or --workers")
    return num_workers, WorkerKind(cpus, gpus, memory_bytes or 0)


def _best_cpus(machines: Sequence[Machine], num_workers: int | None, gpus: int) -> int:
    """The most cores a worker may have with no worker waiting for room, and, if their number is open, with nearly all
    GPUs or cores in use; at least 1."""
    usable = [machine for machine in machines if machine.cpus and machine.gpus >= gpus]
    most = max((machine.cpus for machine in usable), default=1)
    total = sum(machine.gpus if gpus else machine.cpus for machine in usable)
    for cpus in range(most, 0, -1):
        room = _room(usable, cpus, gpus)
        used = room * (gpus or cpus)
        if room >= num_workers if num_workers is not None else used >= NEARLY_ALL * total:
            return cpus
    return 1


def _room(machines: Sequence[Machine], cpus: int, gpus: int) -> int:
    """How many workers of this size run at a time."""
    return sum(
        min(machine.cpus // cpus, machine.gpus // gpus) if gpus else machine.cpus // cpus for machine in machines
    )
