"""Workers that compute in passes are kept full: a cluster of them wins what it has more."""

from __future__ import annotations

import pytest

from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.seam import WorkerKind
from apcbatch.cluster.settings import ClusterSettings, Hooks
from tests.cluster.batches import BatchSeam, seconds_alone
from tests.cluster.runs import Planned, first, planned
from tests.cluster.simulator import answer_of
from tests.plan.plan_oracle import Dataset


@pytest.fixture(scope="module")
def chosen(tau_data: Dataset) -> Planned:
    return planned(first(tau_data, 60), max_tokens=64)


def seconds(chosen: Planned, num_workers: int) -> float:
    """How long a cluster takes, in virtual time."""
    seam = BatchSeam()
    engine = ClusterEngine(seam, ClusterSettings((WorkerKind(),) * num_workers), Hooks(to_wire=lambda request: request))
    answers = {result.id: result for result in engine.run(chosen.requests)}
    assert len(answers) == len(chosen.requests)
    for request in chosen.requests:
        assert request.plan is not None
        assert answers[request.id].token_ids == answer_of(request)
        assert answers[request.id].cached_tokens == request.plan.resume_at
    return seam.last_answer_s


@pytest.mark.data
@pytest.mark.parametrize(("num_workers", "least"), [(1, 0.9), (2, 1.75), (4, 3.0)])
def test_workers_are_kept_full(chosen: Planned, num_workers: int, least: float) -> None:
    """Catches units that come too late or are too few for a GPU's passes to be full: it is no faster for few."""
    gain = seconds_alone(chosen.requests) / seconds(chosen, num_workers)
    print(f"{num_workers} workers are {gain:.2f} times as fast as one engine alone")
    assert gain >= least
