"""Which planned requests may begin, against the definition, and what a request must be to begin at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apcbatch.engine.admission import Admission
from apcbatch.engine.policy import retention_of
from apcbatch.engine.sequence import check_request
from apcbatch.errors import RequestError
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


NO_TOKENS = "token_ids hold something else than token ids"


@pytest.mark.parametrize(
    ("token_ids", "sentence"),
    [
        ([1.5, 2.0], NO_TOKENS),
        (["1", "2"], NO_TOKENS),
        ([True, False], NO_TOKENS),
        ([1, None], NO_TOKENS),
        ([[1], [2]], NO_TOKENS),
        ([[1], [2, 3]], NO_TOKENS),
        (7, NO_TOKENS),
        ([3, -1], NO_TOKENS),
        ([2**31], NO_TOKENS),
        ([2**70], NO_TOKENS),
        (np.array([1.0, 2.0]), NO_TOKENS),
        ([], "the prompt is empty"),
        ([1, 97], "token id 97 is outside the vocabulary; expected less than 97"),
    ],
)
def test_a_prompt_of_anything_but_token_ids_is_refused(token_ids: Any, sentence: str) -> None:
    """Fault: token ids 1.5 and 2.0 were answered as 1 and 2."""
    with pytest.raises(RequestError, match=sentence) as caught:
        check_request(Request("r", token_ids), 97, None, 1000)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("token_ids", [[96, 0], (96, 0), np.array([96, 0], np.uint64), np.array([96, 0], np.int8)])
def test_integers_of_any_kind_are_token_ids(token_ids: Any) -> None:
    """Catches a sequence of integers that is refused, and one that is not made int32."""
    prompt, _ = check_request(Request("r", token_ids), 97, None, 1000)
    assert (prompt.tolist(), prompt.dtype) == ([96, 0], np.int32)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; expected a whole number of at least 1"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], sentence: str) -> None:
    """Catches a bound of a setting that is off, in the Python surface, where no line was checked before."""
    with pytest.raises(RequestError, match=sentence) as caught:
        check_request(Request("r", [1], **options), 97, None, 1000)
    assert caught.value.code == "invalid_request"


def test_the_bounds_themselves_are_settings() -> None:
    """Catches the largest top_p, the smallest max_tokens or a prompt that just fits being refused."""
    _, room = check_request(Request("r", [1, 2, 3], max_tokens=1, temperature=0.0, top_p=1.0), 4, 4, 1000)
    assert room == 1
    with pytest.raises(RequestError) as caught:
        check_request(Request("r", [1, 2, 3, 3]), 4, 4, 1000)
    assert caught.value.code == "context_length_exceeded"
