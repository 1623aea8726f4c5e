"""How many workers of which size a cluster is asked for."""

from __future__ import annotations

import os

import pytest

from apcbatch.cluster.open import _local_cpus, workers_for
from apcbatch.cluster.ray_cluster import Machine
from apcbatch.config import Config
from apcbatch.errors import UsageError

HEAD, SMALL, LARGE, GPUS = Machine(0), Machine(4), Machine(16), Machine(32, 4)


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
    from apcbatch.cluster.open import _gpus_of, _options_of

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
        assert _gpus_of(Config(**given)) == expected, given
    here = os.path.dirname(__file__)
    for model, found in (("demo", "demo"), (os.path.relpath(here), here)):
        _, kind = workers_for([LARGE], 1, 1, 0, None)
        assert _options_of(Config(model=model), None, kind)["config"]["model"] == found
    for gpus, device in ((2, "cuda"), (0, "cpu")):
        _, kind = workers_for([GPUS, LARGE], None, None, gpus, None)
        options = _options_of(Config(gpus=2), None, kind)["config"]
        assert (options["device"], options["gpus"]) == (device, max(1, gpus))


@pytest.mark.parametrize(("options", "cpus"), [({}, 2), ({"workers": 3, "worker_cpus": 2}, 6), ({"worker_cpus": 1}, 2)])
def test_a_local_cluster_has_the_cores_that_its_workers_ask_for(options, cpus, monkeypatch):
    """Fault: the cores of another process, or workers of `--ray local` that are never placed."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1} if process == 0 else set(range(64)))
    assert _local_cpus(Config(**options)) == cpus
