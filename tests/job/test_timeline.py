"""The timeline: sums stay, rows are bounded."""

from __future__ import annotations

import random

from apcbatch.engine.observer import StepFacts
from apcbatch.job.tracing.timeline import Timeline


def facts(draw: random.Random) -> StepFacts:
    seconds = draw.random()
    return StepFacts(seconds, seconds / 4, seconds / 2, seconds / 8, *(draw.randint(1, 99) for _ in range(6)))


def test_sums_stay_however_many_passes_come():
    """Fault: a pass is lost where rows are put together, or the rows go on growing with the run."""
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    for count in (0, 1, 7, 8, 9, 100, 1000):
        timeline, clock, told, failures = Timeline(max_rows=8), 0.0, [], 0
        for _ in range(count):
            told.append(facts(draw))
            clock += told[-1].seconds + draw.random()
            timeline.add(told[-1], clock)
            if draw.random() < 0.1:
                timeline.add_failure()
                failures += 1
        rows = timeline.columns()
        assert len(rows.seconds) <= 8 and (count < 8 or len(rows.seconds) >= 4), (seed, count)
        assert sum(rows.passes) == count and sum(rows.failures) == failures
        for name in ("prefill_tokens", "decode_tokens"):
            assert sum(getattr(rows, name)) == sum(getattr(one, name) for one in told), (seed, count)
        for name in ("seconds", "prefill_s", "decode_s", "store_s"):
            assert abs(sum(getattr(rows, name)) - sum(getattr(one, name) for one in told)) < 1e-4
        assert rows.begin_s == sorted(rows.begin_s)
        assert max(rows.running, default=0) == max((one.running for one in told), default=0)
        assert max(rows.waiting, default=0) == max((one.waiting for one in told), default=0)
        assert rows.pool_bytes[-1:] == [one.pool_bytes for one in told[-1:]], "at the row's end"


def test_failures_are_in_the_pass_that_they_came_with():
    """Fault: the error record of a line that never came to the engine is lost, or the first pass is."""
    timeline = Timeline()
    timeline.add_failure()
    assert timeline.columns().failures == [1] and timeline.columns().passes == [0]
    timeline.add(StepFacts(0.5, 0.1, 0.1, 0.1, 0, 0, 0, 0, 0, 0), 1.0)
    assert timeline.columns().passes == [0], "a step without a pass is idle"
    timeline.add(StepFacts(0.5, 0.1, 0.1, 0.1, 3, 0, 1, 0, 0, 0), 2.0)
    timeline.add(StepFacts(0.5, 0.1, 0.1, 0.1, 3, 0, 1, 0, 0, 0), 4.0)
    timeline.add_failure()
    rows = timeline.columns()
    assert (rows.failures, rows.passes, rows.begin_s) == ([1, 1], [1, 1], [1.5, 3.5])


def test_rows_hold_twice_as_many_passes_each_time_they_are_full():
    """Fault: rows are put together again for each pass, so that the first minutes become one row."""
    timeline = Timeline(max_rows=4)
    for number in range(1, 10):
        timeline.add(StepFacts(1.0, 0.5, 0.5, 0.0, 1, 1, 1, 0, 0, 0), float(number))
        expected = {4: [1, 1, 1, 1], 5: [2, 2, 1], 6: [2, 2, 2], 8: [2, 2, 2, 2], 9: [4, 4, 1]}.get(number)
        assert expected is None or timeline.columns().passes == expected, number
