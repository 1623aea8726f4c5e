"""How many workers of which size a cluster is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.cluster import sizing
from apcbatch.cluster.ray_cluster import Machine
from apcbatch.cluster.runtime import WorkerKind
from apcbatch.cluster.sizing import workers_for
from apcbatch.config import Config
from apcbatch.errors import UsageError
from tests.effort import table

HEAD, SMALL, LARGE, GPUS = Machine(0), Machine(4), Machine(16), Machine(32, 4)


class Asked(Exception):
    """What a cluster's first worker is asked for with: cpus of a local cluster, kind, options of the worker."""


def asked(
    config: Config, *machines: Machine, address: str = "auto"
) -> tuple[int | None, WorkerKind, Mapping[str, Any]]:
    """What a run with these options asks a cluster of these machines for."""
    cpus: list[int | None] = []

    def join(address: str, num_cpus: int | None) -> SimpleNamespace:
        cpus.append(num_cpus)
        return SimpleNamespace(machines=lambda: machines, close=lambda: None)

    def begin(cluster: object, kind: WorkerKind, options: Mapping[str, Any], warn: object) -> None:
        raise Asked(cpus[0], kind, options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Asked) as found:
        patch.setattr(sizing, "RayCluster", join)
        patch.setattr(sizing, "RayRuntime", begin)
        sizing.open_cluster(config, address, None, print, print, hash, None)
    return found.value.args  # type: ignore[return-value]


def test_workers_fill_the_machines():
    """Fault: workers that can never be placed, or cores and GPUs that stay idle."""
    for machines, workers, cpus, gpus, expected in [
        ([HEAD, LARGE, LARGE], None, None, None, (2, 16, 0)),
        ([HEAD, SMALL, LARGE], None, None, None, (5, 4, 0)),
        ([Machine(1), LARGE, LARGE], None, None, None, (2, 16, 0)),
        ([Machine(6), SMALL], None, None, None, (3, 3, 0)),
        ([SMALL, LARGE], None, 4, None, (5, 4, 0)),
        ([LARGE], 3, None, None, (3, 5, 0)),
        ([SMALL], 9, None, None, (9, 1, 0)),
        ([HEAD, GPUS, GPUS], None, None, None, (8, 8, 1)),
        ([GPUS, SMALL], None, None, 0, (9, 4, 0)),
        ([GPUS], 2, None, 1, (2, 16, 1)),
        ([HEAD, GPUS, GPUS], None, None, 2, (4, 16, 2)),
        ([GPUS, Machine(8, 1)], None, None, 2, (2, 16, 2)),
        ([HEAD], 6, None, 1, (6, 1, 1)),
        ([HEAD], 6, 8, None, (6, 8, 0)),
    ]:
        number, kind = workers_for(machines, workers, cpus, gpus, None)
        assert kind.memory_bytes == 0 and workers_for(machines, workers, cpus, gpus, 7)[1].memory_bytes == 7
        assert (number, kind.cpus, kind.gpus) == expected


def test_nothing_to_count_is_said():
    """Fault: a run on no workers, which would wait for ever; or a sentence that names another lack."""
    for machines, cpus, gpus, words in [
        ([HEAD], None, None, "has a core for workers yet; give --workers and --worker-cpus"),
        ([SMALL], 5, None, "has 5 cores; give fewer --worker-cpus, or --workers"),
        ([SMALL], None, 1, "has a GPU yet; give"),
        ([SMALL], None, 2, "has 2 GPUs yet; give"),
    ]:
        with pytest.raises(UsageError, match=f"no machine of the cluster {words}"):
            workers_for(machines, None, cpus, gpus, None)


def test_a_worker_may_have_several_gpus():
    """Fault: `--gpus` that asks Ray for one GPU, or for none, and a worker that spreads its model over GPUs that it
    does not have."""
    for given, expected in (
        ({}, None),
        ({"device": "cuda"}, 1),
        ({"device": "cpu"}, 0),
        ({"gpus": 2}, 2),
        ({"gpus": 2, "device": "cuda", "worker_gpus": 1}, 2),
        ({"worker_gpus": 0}, 0),
        ({"worker_gpus": 0, "gpus": 2}, 0),
        ({"device": "cpu", "gpus": 2}, 0),
        ({"worker_gpus": 1}, 1),
    ):
        for machine in (LARGE, GPUS):  # None: a GPU for each worker, where there are any
            _, kind, _ = asked(Config(workers=1, worker_cpus=1, **given), machine)
            assert kind.gpus == (min(machine.gpus, 1) if expected is None else expected), (given, machine)
    here = os.path.dirname(__file__)
    for model, found in (("demo", "demo"), (os.path.relpath(here), here)):
        assert asked(Config(model=model), LARGE)[2]["config"]["model"] == found
    for gpus, device in ((2, "cuda"), (0, "cpu")):
        _, _, options = asked(Config(gpus=2, worker_gpus=gpus), GPUS, LARGE)
        assert (options["config"]["device"], options["config"]["gpus"]) == (device, max(1, gpus))


@table("options, cpus", [({}, 2), ({"workers": 3, "worker_cpus": 2}, 6), ({"worker_cpus": 1}, 2)])
def test_a_local_cluster_has_the_cores_that_its_workers_ask_for(options, cpus, monkeypatch):
    """Fault: the cores of another process, or workers of `--ray local` that are never placed."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1} if process == 0 else set(range(64)))
    assert asked(Config(**options), LARGE, address="local")[0] == cpus
