"""Kills of workers on Ray, beside those in the simulator: what becomes of the requests.

    python -m benchmarks.cluster_kills ../shared/data --add

On Ray: the real driver and real processes on a cluster of this machine, with workers that sleep instead of computing
(tests/ray/fakes.py), ended by SIGKILL at seeded times. In the simulator: benchmarks/cluster.py::killed. A request that
two kills happened to hit, the second time while it ran alone, is an error record; --retry-errors runs it again. --add
puts the document into benchmarks/results/cluster.json, from which `python tools/cluster_table.py` makes a table.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import click

from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.ray_cluster import LOCAL, RayCluster
from apcbatch.cluster.ray_runtime import RayRuntime
from apcbatch.cluster.runtime import ClusterSettings, Hooks, WorkerKind
from apcbatch.engine.serving import serve
from apcbatch.types import Request, Result
from benchmarks.cluster import RESULTS, killed
from tests.cluster.runs import first
from tests.cluster.simulator import Speeds
from tests.plan.test_plan_cases import read_words
from tests.ray.fakes import make_fake

NAME = "kills"
SPEEDS = Speeds(2000.0, 1000.0, bytes_per_s=1e9, state_bytes=20 << 20)
WORKERS, REQUESTS_PER_KILL, BETWEEN_S = 2, 60, (0.5, 2.0)
SEED = 0


def killed_on_ray(num_kills: int) -> dict[str, int]:
    """One run that ends when all requests are answered; workers are killed while it continues."""
    source = random.Random(SEED)
    engine = ClusterEngine(
        RayRuntime(RayCluster(LOCAL, WORKERS), WorkerKind(cpus=1), {"threads": 1}, make=make_fake),
        ClusterSettings(WORKERS),
        Hooks(to_wire=lambda request: request.id),
    )
    orders = [f"sleep {0.02 + number / 1e6:.6f}" for number in range(REQUESTS_PER_KILL * num_kills)]
    requests = (Request(order, [1]) for order in orders)
    results: list[Result] = []
    kills, next_kill = 0, time.monotonic()
    for some in serve(engine, lambda: next(requests, None)):
        results += some
        if kills < num_kills and time.monotonic() > next_kill and engine._workers.ready:
            with suppress(ProcessLookupError):
                os.kill(source.choice(engine._workers.ready).known.pool_bytes, signal.SIGKILL)  # its pid
                kills += 1
            next_kill = time.monotonic() + source.uniform(*BETWEEN_S)
    lost = [one for one in engine.counters.workers if one["ending"] == "lost"]
    engine.close()
    assert len(lost) >= kills > 0
    assert sorted(result.id for result in results) == sorted(orders), "requests are lost or doubled"
    failed = sum(result.error is not None for result in results)
    return {"kills": kills, "runs": 1, "requests": len(orders), "requests retried": failed, "lost or doubled": 0}


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--on-ray", default=8, help="Kills on Ray.")
@click.option("--simulated", default=40, help="Simulated runs, with one to four kills each.")
@click.option("--add", is_flag=True, help="Put the document into benchmarks/results/cluster.json.")
def main(folder: Path, on_ray: int, simulated: int, add: bool) -> None:
    data = first(read_words(folder / "tau_bench.jsonl"), 16)
    counts = killed(data, simulated, SPEEDS)
    found = {
        "simulated": {
            "kills": counts["kills"], "runs": simulated, "requests": simulated * len(data.prompts),
            "requests retried": counts["requests retried"], "lost or doubled": counts["lost, doubled or different"],
        },
        "Ray": killed_on_ray(on_ray),
    }  # fmt: skip
    click.echo(json.dumps(found, indent=1))
    if add:
        stored = json.loads(RESULTS.read_text(encoding="utf-8"))
        RESULTS.write_text(json.dumps(stored | {NAME: found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
