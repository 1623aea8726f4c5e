"""The driver over real workers, each a process: the whole way of units, states and answers, and one that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.runtime import ClusterSettings, Hooks
from apcbatch.cluster.wire import encode_request
from apcbatch.engine.serving import serve
from apcbatch.plan.planner import Planner
from tests.cluster.processes import ProcessRuntime
from tests.cluster.runs import num_lost
from tests.cluster.test_worker import BLOCK, POOL_BYTES, alone, record, requests_of
from tests.plan.plan_oracle import Dataset, make_plan, random_dataset, within_vocabulary
from tests.tiny import VOCAB


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kills"), [("mamba", 0), ("jamba", 1)])
def test_a_plan_over_processes(family: str, kills: int, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Catches an answer that depends on where it was computed or on a worker that was killed, one that is lost or
    doubled, and a state that stays behind when its last reader has come."""
    parts = [within_vocabulary(random_dataset(seed), VOCAB, stretch=3) for seed in range(5, 12)]
    prompts = [prompt for part in parts for prompt in part.prompts]
    folder, data = str(tiny_checkpoint(family)), Dataset(prompts, list(range(len(prompts))))
    requests, plan = requests_of(data), make_plan(data, Planner(BLOCK))
    expected = alone(folder, requests, plan)
    config = {"model": folder, "device": "cpu", "block_size": BLOCK, "pool_size": POOL_BYTES}
    runtime = ProcessRuntime(config, tmp_path, together=2)
    settings = ClusterSettings(2, least_unit_s=1e-6, least_sent_tokens=1)
    engine = ClusterEngine(runtime, settings, Hooks(to_wire=encode_request))
    source = iter([replace(requests[index], plan=plan.requests[index]) for index in plan.order])
    found: dict[int, tuple] = {}
    was_lent, killed = False, 0
    for results in serve(engine, lambda: next(source, None)):
        for result in results:
            assert int(result.id) not in found
            found[int(result.id)] = record(result)
        was_lent |= any(states for local in runtime.workers.values() for states in local.lent.values())
        if killed < kills and found:
            os.kill(next(local.process.pid for local in runtime.workers.values() if local.lent), signal.SIGKILL)
            killed += 1
    assert num_lost(engine) == killed == kills
    assert {index: one[:5] for index, one in found.items()} == {index: one[:5] for index, one in expected.items()}
    if not kills:
        assert found == expected and was_lent
    while any(local.lent for local in runtime.workers.values()):  # until the last unit is said to be done
        runtime.wait(1.0)
    assert not runtime.states
    runtime.close()
