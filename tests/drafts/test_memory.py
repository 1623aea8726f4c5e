"""The bytes that drafts hold: within their limit, counted as they are, the oldest answers leave first."""

from __future__ import annotations

import random

import numpy as np
import pytest

from apcbatch.drafts.drafter import Drafts
from apcbatch.drafts.siblings import ENTRY_BYTES, MOST_ANSWERS, Siblings
from apcbatch.prefix import TokenArray
from apcbatch.types import DraftSource
from tests.effort import seeds


def drawn(count: int) -> TokenArray:
    return np.array([random.randrange(1 << 31) for _ in range(count)], dtype=np.int32)


def counted(siblings: Siblings) -> int:
    answers = siblings._answers.values()
    return sum(ENTRY_BYTES + sum(ENTRY_BYTES + one.nbytes for one in several) for several in answers)


@pytest.mark.parametrize("sources", [["history"], ["siblings"], ["history", "siblings", "lookup"], ["lookup"]])
def test_held_bytes_stay_within_the_limit(sources: list[DraftSource]) -> None:
    """Fault: the index grows past max_bytes, or forgets to count a part of what it holds."""
    for _ in seeds(30):
        limit = random.choice([0, 1, 1000, 20_000, 300_000])
        drafts = Drafts(sources, limit)
        for _ in range(60):
            prompt, answer = drawn(random.randrange(1, 300)), drawn(random.randrange(200))
            tokens = np.concatenate([prompt, answer])
            drafts.add(tokens, len(prompt), random.randrange(len(tokens) + 1))
            assert 0 <= drafts.held_bytes <= limit
        if sources == ["lookup"]:
            assert drafts.held_bytes == 0
        if limit == 300_000 and "history" in sources:
            assert drafts.held_bytes > 200_000


def test_the_least_recently_used_prompts_leave() -> None:
    """Fault: siblings of a prompt that is in use leave before others, bytes are counted wrongly, or answers that left
    stay."""
    for _ in seeds(30):
        limit = random.randrange(3000, 40_000)
        siblings = Siblings(limit)
        used, kept = drawn(9), drawn(50)
        siblings.add(used, kept)
        for _ in range(40):
            siblings.add(drawn(5), drawn(random.randrange(1, 100)))
            assert siblings.held_bytes == counted(siblings) <= limit
            assert [list(one) for one in siblings.find(used)] == [list(kept)]


def test_the_newest_answers_of_a_prompt_stay() -> None:
    """Fault: the answers of one prompt grow without limit, or the newest leave."""
    for limit in (1 << 20, 4 * ENTRY_BYTES):
        siblings, prompt = Siblings(limit), drawn(9)
        for number in range(30):
            siblings.add(prompt, np.array([number], dtype=np.int32))
            assert siblings.held_bytes == counted(siblings) <= limit
        found = [int(one[0]) for one in siblings.find(prompt)]
        assert found == list(range(30 - len(found), 30))
        assert len(found) == (MOST_ANSWERS if limit > 10_000 else 2)


def test_an_answer_is_a_copy() -> None:
    """Fault: the index holds on to the caller's array, which is far larger, or changes with it."""
    siblings, prompt = Siblings(1 << 20), drawn(9)
    answer = drawn(5)
    before = list(answer)
    siblings.add(prompt, answer)
    answer[:] = 0
    assert list(siblings.find(prompt)[0]) == before


def test_a_drafter_holds_as_many_bytes_as_its_tokens_need() -> None:
    """Fault: the index of a long running answer doubles without need, or is not counted."""
    drafter = Drafts(["lookup"], 0).begin(drawn(10_000), {})
    assert 44 * 10_000 <= drafter.held_bytes <= 44 * 12_000
    drafter.append([1] * 20_000)
    assert 44 * 30_000 <= drafter.held_bytes <= 44 * 60_000
