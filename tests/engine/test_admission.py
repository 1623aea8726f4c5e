"""Which planned requests may begin, against the definition, and the gate before waiting sequences: few passes have
prompts in them, and no request waits for ever or gets another answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from apcbatch import Engine
from apcbatch.engine.admission import Admission, PrefillAdmission
from apcbatch.engine.policy import retention_of
from apcbatch.model.locate import DEMO_DIR
from apcbatch.types import Request, RequestPlan
from tests.effort import table
from tests.engine.opened import OpenedEngine

NUM_PLACES = 32


def sequence(number: int, live: int, keep: int) -> Any:
    """A planned sequence, as far as admission looks at it."""
    plan = RequestPlan(live_bytes=live, keep_bytes=keep)
    return SimpleNamespace(number=number, retention=SimpleNamespace(plan=plan))


def may_begin(one: Any, first: Any, passed: list[Any], begun: dict[int, int], capacity: int) -> bool:
    """By definition: beside what each request that is ahead needs while it runs, there is room for what this one
    keeps and for what those behind that request keep who have begun."""
    mine = one.retention.plan.keep_bytes
    ahead = [(first, begun.get(first.number, 0)), *((other, other.retention.plan.keep_bytes) for other in passed)]
    return all(
        other.retention.plan.live_bytes + own + mine
        + sum(kept for number, kept in begun.items() if number > other.number) <= capacity
        for other, own in ahead
    )  # fmt: skip


@given(
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=2, max_size=9),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=5),
)
@example(10, [(8, 0), (0, 3), (0, 1), (8, 2), (0, 1)], [(0, 9), (0, 9)])  # 3 is passed over behind 2, which has begun
def test_begins_are_those_of_the_definition(
    capacity: int, plans: list[tuple[int, int]], walks: list[tuple[int, int]]
) -> None:
    """Catches room that is promised twice: what the first unfinished request itself keeps left out of the sum, what
    began behind a request that waits, and what began in the same walk. walks: how many of the first requests have
    ended since, and how many are looked at."""
    admission = Admission(capacity)
    everyone = [sequence(number, *plan) for number, plan in enumerate(plans)]
    begun: dict[int, int] = {}
    ended = 0
    for finished, looked_at in walks:
        ended = min(ended + finished, len(everyone) - 1)
        waiting = [one for one in everyone[ended:] if one.number not in begun]
        admission.begin(everyone[ended])
        passed: list[Any] = []
        for one in waiting[:looked_at]:
            assert admission.fits(one) == may_begin(one, everyone[ended], passed, begun, capacity)
            if admission.fits(one):
                admission.admit(one)
                begun[one.number] = one.retention.plan.keep_bytes
            else:
                admission.pass_over(one)
                passed.append(one)


def test_what_the_first_one_keeps_counts_until_it_has_ended() -> None:
    """Fault: the request that computes now has begun itself, and what it keeps was not counted; or an error, or a wait,
    for a request that keeps nothing for others."""
    admission, first, second = Admission(10), sequence(0, 0, 6), sequence(1, 0, 5)
    admission.begin(first)
    assert admission.fits(first)
    admission.admit(first)
    assert not admission.fits(second)
    admission.begin(first)
    assert not admission.fits(second)
    admission.begin(second)
    assert admission.fits(second)
    admission, retention = Admission(0), retention_of("planned", Request("plain", [1]), 1, 64)
    plain: Any = SimpleNamespace(number=0, retention=retention)
    admission.begin(plain)
    admission.pass_over(plain)
    assert admission.fits(plain) and not admission.fits(sequence(1, 0, 1))


def test_a_gate_opens_at_a_fourth_of_the_places_or_at_its_cost() -> None:
    """Catches a CPU, where a prompt costs what its tokens do, that leaves places empty; sequences that end together and
    whose places stay empty; a bound that is one off, and places that stood empty before it was closed and are counted
    again."""
    free = PrefillAdmission(NUM_PLACES, cost=0)
    for num_free in (1, 5, 1):
        assert free.opens(num_free)
        free.close()
    assert PrefillAdmission(NUM_PLACES, cost=3).opens(NUM_PLACES // 4)
    assert [PrefillAdmission(10, cost=3).opens(num_free) for num_free in (2, 3)] == [False, True]
    gate = PrefillAdmission(8, cost=2)
    for _ in range(2):
        assert [gate.opens(1) for _ in range(17)] == [False] * 15 + [True] * 2
        gate.close()


@table("between", [1, 4, 32, 100, 1000])
def test_no_more_is_lost_than_a_pass_with_prompts_costs(between: int) -> None:
    """Catches a gate that stays closed while more places stand empty than the prompts would have cost, or opens for
    each place that is free. One sequence ends every `between` passes."""
    gate, lost, num_free = PrefillAdmission(NUM_PLACES, cost=3), 0, 0
    for index in range(10 * between):
        num_free += index % between == 0
        if gate.opens(num_free):
            break
        lost += num_free
    assert gate.opens(1), "an open gate stays open until it is closed"
    assert lost < 3 * NUM_PLACES
    assert num_free == NUM_PLACES // 4 or lost + num_free >= 3 * NUM_PLACES
    gate.close()
    assert not gate.opens(1)


def test_prompts_cost_decode_passes_only_where_passes_run_ahead(
    stages: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a CPU that leaves places empty, and a device whose decode passes wait for each prompt."""
    made: list[tuple[int, int]] = []
    monkeypatch.setattr("apcbatch.engine.scheduler.PrefillAdmission", lambda *of: made.append(of))
    for count in (1, 2):
        stages(count)
        Engine(DEMO_DIR, max_running=16).close()
    assert made == [(16, 0), (32, 3)]


class _Watched:
    """An engine on the CPU whose prompts are said to cost so much; it counts the passes with prompts."""

    def __init__(self, cost: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("apcbatch.engine.scheduler.PrefillAdmission", lambda most, _: PrefillAdmission(most, cost))
            self.engine = OpenedEngine(DEMO_DIR, max_running=16, block_size=16, policy="planned")
        self.num_passes = self.num_with_prompts = 0
        scheduler = self.engine.parts.scheduler
        schedule = scheduler.schedule

        def counted(*begun):  # type: ignore[no-untyped-def]
            chunks, impossible = schedule(*begun)
            self.num_passes += 1
            self.num_with_prompts += any(chunk.sequence.in_prefill for chunk in chunks)
            return chunks, impossible

        scheduler.schedule = counted  # type: ignore[method-assign]


@pytest.mark.slow
def test_answers_are_the_same_behind_a_gate() -> None:
    """Catches a gate that changes an answer or strands a request, and one that spares no pass with prompts."""
    source = random.Random(7)
    requests = [
        Request(str(n), [source.randrange(3, 500) for _ in range(source.randint(1, 40))], source.randint(1, 40))
        for n in range(60)
    ]
    runs = {}
    for cost in (0, 3):
        watched = _Watched(cost)
        answers = {result.id: result.token_ids for result in watched.engine.run(requests)}
        assert len(answers) == len(requests)
        runs[cost] = watched, answers
    assert runs[0][1] == runs[3][1]
    (open_, _), (gated, _) = runs[0], runs[3]
    assert gated.num_with_prompts < 0.6 * open_.num_with_prompts
    assert gated.num_passes < 1.3 * open_.num_passes
