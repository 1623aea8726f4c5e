"""Open the engine of a run on a Ray cluster: choose the number of workers, their resources and their options."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.ray_cluster import LOCAL, Machine, RayCluster
from apcbatch.cluster.ray_runtime import RayRuntime
from apcbatch.cluster.runtime import ClusterSettings, Hooks, WorkerKind
from apcbatch.cluster.wire import encode_request
from apcbatch.config import Config
from apcbatch.errors import UsageError
from apcbatch.process import settle_collector
from apcbatch.types import Request

NEARLY_ALL = 0.9  # share of the cores or GPUs that count as all in use
DRIVER_ONLY = ("cache_salt", "origins")  # fields of Config that are not sent to workers


def open_cluster(
    config: Config,
    address: str,
    salt: str | None,
    warn: Callable[[str], None],
    say: Callable[[str], None],
    conversation_of: Callable[[Request], Hashable],
    most_workers: int | None,
) -> ClusterEngine:
    """Open an engine over workers of the cluster at an address, and wait for the first worker.

    salt: the cache salt itself. warn: receives warnings. say: receives a line when a worker starts or ends.
    conversation_of: returns an id of the conversation that a request belongs to. most_workers: maximum number of
    workers that can have work; None if unknown.

    Raises UsageError if the cluster cannot be joined or started, or has no suitable machine. Raises StoppedError if no
    worker becomes ready.
    """
    settle_collector()
    asked = (config.workers or 1) * (config.worker_cpus or 1)
    cluster = RayCluster(address, max(len(os.sched_getaffinity(0)), asked) if address == LOCAL else None)
    try:
        sizes = (config.workers, config.worker_cpus, _gpus_of(config), config.worker_memory)
        number, kind = workers_for(cluster.machines(), *sizes)
        number = min(number, most_workers or number)
        runtime = RayRuntime(cluster, kind, _options_of(config, salt, kind), warn)
        say(f"{number} workers with {kind.cpus} cores and {kind.gpus} GPUs each are asked for")
        settings = ClusterSettings(number, worker_timeout_s=config.worker_timeout)
        hooks = Hooks(encode_request, runtime.held, conversation_of, say)
        return ClusterEngine(runtime, settings, hooks)
    except BaseException:
        cluster.close()
        raise


def _gpus_of(config: Config) -> int | None:
    """Return the number of GPUs per worker. None lets workers_for choose: 1 if a machine of the cluster has a GPU,
    otherwise 0."""
    if config.device == "cpu" or config.worker_gpus == 0:
        return 0
    if config.device == "cuda" or config.gpus > 1:
        return config.gpus
    return config.worker_gpus


def _options_of(config: Config, salt: str | None, kind: WorkerKind) -> Mapping[str, Any]:
    """Return the arguments of the worker's constructor. Paths are made absolute here."""
    names = (one.name for one in dataclasses.fields(config) if one.name not in DRIVER_ONLY)
    values = {name: getattr(config, name) for name in names}
    if os.path.isdir(config.model):
        values["model"] = os.path.abspath(config.model)
    for name in ("store", "adapter"):
        values[name] = values[name] and os.path.abspath(values[name])
    values["gpus"] = max(1, kind.gpus)
    if config.device == "auto":
        values["device"] = "cuda" if kind.gpus else "cpu"
    return {"config": values, "salt": salt, "threads": kind.cpus}


def workers_for(
    machines: Sequence[Machine],
    num_workers: int | None,
    cpus: int | None,
    gpus: int | None,
    memory_bytes: int | None,
) -> tuple[int, WorkerKind]:
    """Return the number of workers to request and their resources, choosing those that are None.

    If num_workers and cpus are None, see _best_cpus: on machines that are alike, one worker per `gpus` GPUs; without
    GPUs one worker per machine, with all its cores. If only cpus is None: the largest number of cores per worker at
    which all workers run at once.

    Raises UsageError if num_workers is None and no machine fits.
    """
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
    """Return the largest number of cores per worker at which all workers run at once, at least 1.

    num_workers: None if it is not given; then the workers must use at least NEARLY_ALL of the GPUs, or of the cores if
    gpus is 0.
    """
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
    """Return how many workers with these resources run at once."""
    return sum(
        min(machine.cpus // cpus, machine.gpus // gpus) if gpus else machine.cpus // cpus for machine in machines
    )
