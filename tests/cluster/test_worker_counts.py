"""What the summary says of each worker."""

from __future__ import annotations

import pytest

from apcbatch.cluster.wire import Piece, Unit
from apcbatch.cluster.worker import RunningUnit
from apcbatch.cluster.workers import WorkerCounts
from apcbatch.errors import RequestError
from apcbatch.types import Result
from tests.cluster.runs import Planned, run
from tests.cluster.simulator import Trouble


def test_a_tally_adds_up() -> None:
    """Catches a sum that is taken from another number, a first token that is counted as decoded, and errors that are
    counted as work."""
    counts = WorkerCounts(3, "host", "cpu")
    assert counts.summary()["tokens_per_s"] is None
    some = {"cached_tokens": 6, "computed_tokens": 4, "prefill_ms": 250.0, "decode_ms": 750.0}
    other = Result("other", 10, [1, 2], **some)
    counts.add(Result("one", 10, [1, 2, 3], **some, others=[other]))
    counts.add(Result("two", 10, [], **some))
    counts.add(Result("three", 10, error=RequestError("invalid_request", "no")))
    assert counts.summary() == {
        "id": 3, "node": "host", "device": "cpu", "units": 0, "requests": 3, "prefill_tokens": 8, "decode_tokens": 3,
        "cached_tokens": 12, "busy_s": 2.0,
        "states_received": 0, "states_missing": 0, "requests_unfinished": 0, "tokens_per_s": 5.5, "ending": None,
    }  # fmt: skip


@pytest.mark.parametrize("poison", [0, 1])
def test_workers_add_up_to_the_run(tau: Planned, poison: int) -> None:
    """Catches a worker that is missing or there twice, and work that is counted for two or for none."""
    ids = frozenset(request.id for request in tau.requests[50 : 50 + poison])
    outcome = run(tau.requests, 4, trouble=Trouble(poison=ids))
    workers = outcome.engine.counters.workers
    assert [one["id"] for one in workers] == list(range(1, 5 + 2 * poison))
    assert [one["ending"] for one in workers].count("lost") == 2 * poison
    answered = [result for result in outcome.results if result.error is None]
    assert sum(one["requests"] for one in workers) == len(answered) == len(tau.requests) - poison
    for name in ("cached_tokens", "computed_tokens"):
        found = sum(one["prefill_tokens" if name == "computed_tokens" else name] for one in workers)
        assert found == sum(getattr(result, name) for result in answered)
    assert bool(poison) == bool(sum(one["requests_unfinished"] for one in workers))
    not_ended = outcome.runtime.num_units - sum(one["units"] for one in workers)
    assert 2 * poison <= not_ended <= 4 * poison
    assert all(one["node"] and one["device"] == "cpu" for one in workers)


def test_a_unit_counts_its_answers() -> None:
    """Catches a unit whose time or tokens are others than its answers took, from which the rates are learnt."""
    running = RunningUnit(Unit(1, (Piece(0, None, None), Piece(1, None, None)), {}, {}))
    some = {"computed_tokens": 4, "prefill_ms": 250.0, "decode_ms": 750.0}
    others = [Result("other", 10, [1, 2]), Result("short", 10, [1]), Result("empty", 10, [])]
    running.add(0, Result("one", 10, [1, 2, 3], **some, others=others))
    running.add(1, Result("two", 10, **some, error=RequestError("invalid_request", "no")))
    assert (running.seconds, running.prefill_tokens, running.decode_tokens, running.num_left) == (1.0, 4, 3, 0)
    assert [message.number for message in running.messages] == [0, 1]
