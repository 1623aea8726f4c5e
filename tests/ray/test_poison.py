"""The driver over Ray with a request that kills the process of whatever worker has it."""

from __future__ import annotations

from typing import Any

import pytest

from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.ray_cluster import RayCluster
from apcbatch.cluster.ray_runtime import RayRuntime
from apcbatch.cluster.runtime import ClusterSettings, Hooks, WorkerKind
from apcbatch.types import Request
from tests.cluster.runs import num_lost
from tests.ray.fakes import make_fake

pytestmark = pytest.mark.ray


@pytest.mark.effort(3)
@pytest.mark.usefixtures("nodes")
def test_a_request_that_ends_workers_ends_two() -> None:
    """Catches a third process that ends, a request that is lost with it, and one that is blamed for nothing."""
    runtime = RayRuntime(RayCluster("auto"), WorkerKind(cpus=1), {"threads": 1}, make=make_fake)
    lines: list[str] = []
    hooks = Hooks(to_wire=lambda request: request.id, say=lines.append)
    engine = ClusterEngine(runtime, ClusterSettings(2), hooks)
    orders = [f"sleep 0.0{n}" for n in range(1, 20)]
    orders.insert(7, "die")
    results: dict[str, Any] = {result.id: result for result in engine.run(Request(one, [1]) for one in orders)}
    engine.close()
    assert sorted(results) == sorted(orders)
    assert {id for id, result in results.items() if result.error is not None} == {"die"}
    assert results["die"].error.code == "worker_lost"
    counters = engine.counters
    assert num_lost(engine) == 2 and sum("is lost" in line for line in lines) == 2
    assert sum(one["requests"] for one in counters.workers) == len(orders) - 1
