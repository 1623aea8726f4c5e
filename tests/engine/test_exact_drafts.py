"""Why drafts change answers elsewhere, case by case: each test writes its drafts down and says where they go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apcbatch import Engine, Request
from tests.engine.runs import told
from tests.engine.scripted_drafts import (
    PROMPT,
    STEADY,
    accepted,
    drafting,
    right,
    without_drafts,
    wrong,
)
from tests.engine.test_given_back import Books


@pytest.mark.drawn(8)
@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("then", ["plain", "another draft"])
def test_roll_back_at_every_length(num_right: int, then: str, untied_folder: Path, way: str) -> None:
    """Fault: a state, an input of the convolution or a key that has a rejected token, or lacks an accepted one."""
    request = Request("a", PROMPT, max_tokens=30, ignore_eos=True, logprobs=True)
    plain = Engine(untied_folder, policy="all", draft=(), **STEADY)
    (expected,) = plain.run([request])
    answer = expected.token_ids

    def draft(prompt: list[int], done: list[int]) -> Sequence[int]:
        at = len(done)
        if at == 1:
            return answer[at : at + num_right] + [wrong(one) for one in answer[at + num_right : at + 5]]
        return [answer[at], wrong(answer[at + 1])] if then == "another draft" and at < 28 else ()

    engine = drafting(untied_folder, draft, policy="all", **STEADY)
    (found,) = engine.run([request])
    assert told(found) == told(expected)
    if then == "plain":
        assert engine.counters.drafts == {"lookup": (5, num_right)}
    whole = PROMPT + answer
    assert engine.boundaries(whole) == plain.boundaries(whole) == [16, 32, 48]
    for position in (32, 48):
        ours, theirs = engine.snapshot(whole[:position]), plain.snapshot(whole[:position])
        assert all(ours[name].equal(theirs[name]) for name in theirs), position
    engine.close()
    plain.close()


class Pair:
    """Ends an answer at two tokens in a row, as a stop text of two tokens does."""

    def __init__(self, first: int, second: int) -> None:
        self._pair, self._last = (first, second), -1

    def accept(self, token: int, may_end: bool) -> str | None:
        pair, self._last = (self._last, token), token
        return "pair" if pair == self._pair else None


class EndsWith:
    """A constraint that allows everything and is complete with its `most`-th token."""

    def __init__(self, most: int) -> None:
        self._left = most

    def fill(self, mask: np.ndarray) -> bool:
        return False

    def accept(self, token: int) -> bool:
        self._left -= 1
        assert self._left >= 0, "a token behind the end"
        return not self._left


@pytest.mark.drawn(10)
@pytest.mark.parametrize("most", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("what", ["stop text", "stop token", "complete form", "limit"])
def test_an_end_inside_a_draft(what: str, most: int, untied_folder: Path, way: str) -> None:
    """Fault: tokens of a draft behind the stop text, the stop token, the end of a grammar or max_tokens are in the
    answer; or a stop text of which one token is drawn and the next one drafted is overlooked."""
    free = Request("a", PROMPT, max_tokens=30, temperature=1.0, seed=8, logprobs=True, ignore_eos=True)
    answer = without_drafts(untied_folder, [free])["a"].token_ids
    first = next(n for n in range(4, 28) if answer[n + 1] not in answer[: n + 1])  # the end is answer[first + 1]
    ends: dict[str, dict[str, Any]] = {
        "stop text": {"ending": lambda: Pair(answer[first], answer[first + 1])},
        "stop token": {"stop_token_ids": [answer[first + 1]]},
        "complete form": {"constraint": lambda: EndsWith(first + 2)},
        "limit": {"max_tokens": first + 2},
    }
    request = replace(free, **ends[what])
    expected = without_drafts(untied_folder, [request])["a"]
    assert len(expected.token_ids) == first + 2
    engine = drafting(untied_folder, right({tuple(PROMPT): [answer]}, most), policy="all", **STEADY)
    books = Books(engine)
    (found,) = engine.run([request])
    assert told(found) == told(expected) and accepted(engine)
    assert max(engine.boundaries(PROMPT + answer), default=0) <= len(PROMPT) + first + 1
    books.balance()
    engine.close()
