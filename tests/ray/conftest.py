"""One cluster for all tests here: a head without cores and two nodes, all on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STORE_BYTES = 100 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the Ray tests first, so that pytest-xdist gives all of them to one process, which has the one cluster. Skip
    them where Ray is not installed."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
    if importlib.util.find_spec("ray") is None:
        for item in items:
            if item.get_closest_marker("ray"):
                item.add_marker(pytest.mark.skip(reason="ray is not installed"))


@pytest.fixture(scope="package")
def nodes() -> Iterator[Any]:
    """A ray.cluster_utils.Cluster, which this process has joined; nodes may be added and removed."""
    import ray
    from ray.cluster_utils import Cluster

    quick = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 3,
        "worker_niceness": 0,  # Ray's 15 leaves a worker no time beside the other tests
    }
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES, "_system_config": quick,
        },
    )  # fmt: skip
    add_node(cluster)
    add_node(cluster)
    ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def add_node(cluster: Any) -> Any:
    """Another node with room for one worker."""
    return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the examples, which share beginnings."""
    path = tmp_path_factory.mktemp("input") / "agents.jsonl"
    lines = (ROOT / "examples" / "agents.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:10]))
    return path
