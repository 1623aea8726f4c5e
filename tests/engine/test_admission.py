"""Which planned requests may begin, against the definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from apcbatch.engine.admission import Admission
from apcbatch.engine.policy import retention_of
from apcbatch.types import Request, RequestPlan


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
    """Fault: the request that computes now has begun itself, and what it keeps was not counted."""
    admission, first, second = Admission(10), sequence(0, 0, 6), sequence(1, 0, 5)
    admission.begin(first)
    assert admission.fits(first)
    admission.admit(first)
    assert not admission.fits(second)
    admission.begin(first)
    assert not admission.fits(second)
    admission.begin(second)
    assert admission.fits(second)


def test_a_request_without_a_plan_takes_no_room() -> None:
    """Catches an error, or a wait, for a request that keeps nothing for others."""
    admission = Admission(0)
    retention = retention_of("planned", Request("plain", [1]), 1, 64)
    plain: Any = SimpleNamespace(number=0, retention=retention)
    admission.begin(plain)
    admission.pass_over(plain)
    assert admission.fits(plain) and not admission.fits(sequence(1, 0, 1))
