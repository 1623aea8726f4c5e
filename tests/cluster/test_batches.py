"""Workers that compute in passes are kept full: a cluster of them wins what it has more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from apcbatch.cluster.runtime import ClusterSettings
from apcbatch.cluster.wire import Piece, Unit
from tests.cluster.batches import H200, Batcher, BatchRuntime
from tests.cluster.runs import Planned, SeenEngine, first, planned
from tests.cluster.simulated_work import answer_of
from tests.plan.plan_oracle import Dataset


@pytest.fixture(scope="module")
def chosen(tau_data: Dataset) -> Planned:
    return planned(first(tau_data, 60), max_tokens=64)


@pytest.fixture(scope="module")
def alone_s(chosen: Planned) -> float:
    """What one engine takes that has all requests from the start."""
    pieces = (Piece(number, request, request.plan) for number, request in enumerate(chosen.requests))
    batcher = Batcher(H200)
    batcher.begin(Unit(1, tuple(pieces)))
    while batcher.is_busy:
        batcher.step()
    return batcher.now


@pytest.mark.drawn(1)
@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "least"), [(1, 0.9), (2, 1.75), (4, 2.9)])
def test_workers_are_kept_full(chosen: Planned, alone_s: float, num_workers: int, least: float) -> None:
    """Catches units that come too late or are too few for a GPU's passes to be full: it is no faster for few."""
    runtime = BatchRuntime()
    engine = SeenEngine(runtime, ClusterSettings(num_workers))
    answers = {result.id: result for result in engine.run(chosen.requests)}
    assert len(answers) == len(chosen.requests)
    for request in chosen.requests:
        assert request.plan is not None
        assert answers[request.id].token_ids == answer_of(request)
        assert 0 <= request.plan.resume_at - answers[request.id].cached_tokens < 16
    assert alone_s / runtime.last_answer_s >= least


@pytest.mark.data
def test_what_units_bring_along_leaves_room(chosen: Planned) -> None:
    """Catches many units at a worker whose states do not fit into its pool beside each other."""
    speeds = replace(H200, pool_bytes=8 * H200.state_bytes)
    runtime = BatchRuntime(speeds)
    engine = SeenEngine(runtime, ClusterSettings(2))
    imported: list[int] = []
    submit = runtime.submit

    def watched(worker: int, unit: Unit, states: Mapping[bytes, bytes]) -> None:
        submit(worker, unit, states)
        one = engine.workers.get(worker)
        assert one is not None
        imported.append(sum(assignment.import_bytes for assignment in [*one.assignments][:-1]) // H200.state_bytes)

    runtime.submit = watched  # type: ignore[method-assign]
    assert len(list(engine.run(chosen.requests))) == len(chosen.requests)
    assert max(imported) == 3, "with half of the pool there is no further unit"
