"""The engine of a run on a Ray cluster: its workers are asked for here.

Must not know: jobs, where the cache salt comes from.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.ray_cluster import LOCAL, RayCluster
from apcbatch.cluster.ray_seam import RaySeam
from apcbatch.cluster.seam import WorkerFacts, WorkerKind
from apcbatch.cluster.settings import ClusterSettings, Hooks
from apcbatch.cluster.sizing import workers_for
from apcbatch.cluster.wire import take_apart
from apcbatch.config import Config
from apcbatch.engine.settings import check_request
from apcbatch.errors import RequestError
from apcbatch.process import settle_collector
from apcbatch.types import Request

STAYS_HERE = ("cache_salt", "origins")  # of a Config


def open_cluster(
    config: Config,
    address: str,
    salt: str | None,
    warn: Callable[[str], None],
    say: Callable[[str], None],
    conversation_of: Callable[[Request], Hashable],
    most_workers: int | None = None,
) -> ClusterEngine:
    """An engine over workers of the cluster at an address. salt: the secret itself. say: gets a line when a worker
    comes or goes. conversation_of: what the requests of one conversation have in common. most_workers: that can have
    work, None if that is not known. Waits for the first worker; UsageError (StoppedError) if there is no cluster, or no
    worker comes."""
    settle_collector()
    cluster = RayCluster(address, _local_cpus(config) if address == LOCAL else None)
    try:
        sizes = (config.workers, config.worker_cpus, _gpus_of(config), config.worker_memory)
        number, kind = workers_for(cluster.machines(), *sizes)
        number = min(number, most_workers or number)
        seam = RaySeam(cluster, kind, _options_of(config, salt, kind), warn)
        say(f"{number} workers with {kind.cpus} cores and {kind.gpus} GPUs each are asked for")
        settings = ClusterSettings(number, worker_timeout_s=config.worker_timeout)
        hooks = Hooks(take_apart, can_run, seam.held, conversation_of, say)
        return ClusterEngine(seam, settings, hooks)
    except BaseException:
        cluster.close()
        raise


def can_run(request: Request, facts: WorkerFacts) -> bool:
    """Whether a worker would take a request."""
    try:
        check_request(request, facts.vocab_size, facts.context_length, facts.max_request_tokens)
    except RequestError:
        return False
    return True


def _local_cpus(config: Config) -> int:
    """Cores of a cluster that is started here: those of this machine, or more if the workers are to have more."""
    asked = (config.workers or 1) * (config.worker_cpus or 1)
    return max(len(os.sched_getaffinity(0)), asked)


def _gpus_of(config: Config) -> int | None:
    """GPUs of a worker; None where one will do, if the cluster has any."""
    if config.device == "cpu" or config.worker_gpus == 0:
        return 0
    if config.device == "cuda" or config.gpus > 1:
        return config.gpus
    return config.worker_gpus


def _options_of(config: Config, salt: str | None, kind: WorkerKind) -> Mapping[str, Any]:
    """What a worker is made with. Paths are as they are here, from the root."""
    values = {name: getattr(config, name) for name in (one.name for one in dataclasses.fields(config))}
    for name in STAYS_HERE:
        del values[name]
    if os.path.isdir(config.model):
        values["model"] = os.path.abspath(config.model)
    if config.store is not None:
        values["store"] = os.path.abspath(config.store)
    values["gpus"] = max(1, kind.gpus)
    if config.device == "auto":
        values["device"] = "cuda" if kind.gpus else "cpu"
    return {"config": values, "salt": salt, "threads": kind.cpus}
