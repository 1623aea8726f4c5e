"""Drafts of running answers: references, siblings, history, lookup, and their limits."""

from __future__ import annotations

import random

import numpy as np
import pytest

from apcbatch.drafts import drafter as drafter_module
from apcbatch.drafts.drafter import Drafter, Drafts
from apcbatch.prefix import TokenArray
from apcbatch.types import DRAFT_SOURCES, DraftSource
from tests.effort import seeds, table

PLENTY = 1 << 24


def array(tokens: list[int]) -> TokenArray:
    return np.array(tokens, dtype=np.int32)


def drawn(count: int, vocabulary: int = 1 << 31) -> list[int]:
    return [random.randrange(vocabulary) for _ in range(count)]


def decode(drafter: Drafter, answer: list[int], least_reach: float, most: int = 16) -> tuple[int, int, int]:
    """Decode an answer from its first token. Returns passes, drafted tokens and accepted tokens."""
    passes = drafted = accepted = at = 0
    while at < len(answer):
        draft = drafter.propose(most)
        tokens = [] if draft is None else draft.tokens[: sum(reach >= least_reach for reach in draft.reach)]
        right = 0
        while right < len(tokens) and at + right < len(answer) and tokens[right] == answer[at + right]:
            right += 1
        drafter.append(answer[at : at + right + 1])
        at += right + 1
        passes, drafted, accepted = passes + 1, drafted + len(tokens), accepted + right
    return passes, drafted, accepted


@table("source", ["recorded", "previous"])
def test_a_reference_that_agrees_is_drafted_whole(source: DraftSource) -> None:
    """Fault: the beginning of an answer is not drafted, drafts do not get longer where all agree, or an answer that is
    known takes a pass for each few tokens."""
    drafts = Drafts([source], PLENTY)
    longest = 0
    for _ in range(30):
        answer = drawn(400)
        drafter = drafts.begin(array(drawn(20)), {source: [array(answer)]})
        first = drafter.propose(64)
        assert first is not None and first.source == source and first.tokens == answer[: len(first.tokens)]
        longest = max(longest, len(first.tokens))
        passes, drafted, accepted = decode(drafter, answer, 0.3, 64)
        assert drafted == accepted
    assert longest == 64
    assert passes <= 10  # 400 tokens, 65 a pass


def test_a_draft_goes_on_behind_a_divergence() -> None:
    """Fault: after its first wrong token a reference is given up, or followed at the wrong place."""
    for _ in seeds(50):
        reference, other = drawn(120), drawn(3)
        cut, skipped = random.randrange(30, 60), random.randrange(5)
        answer = reference[:cut] + other + reference[cut + skipped :]
        drafter = Drafts(["previous"], PLENTY).begin(array([1]), {"previous": [array(reference)]})
        drafter.append(answer[: cut + 3])
        drafter.propose(16)
        drafter.append(answer[cut + 3 : cut + 5])  # two tokens that the reference has
        draft = drafter.propose(16)
        assert draft is not None and draft.tokens == answer[cut + 5 : cut + 5 + len(draft.tokens)]
        assert decode(drafter, answer[cut + 5 :], 0.1)[0] < 30


def test_the_newest_reference_decides_among_equals() -> None:
    """Fault: of references that agree so far, the oldest decides, or the number of those that continue with a token
    does not matter."""
    drafts = Drafts(["previous"], PLENTY)
    start = drawn(5)
    answers = [array([*start, 1, 1]), array([*start, 2, 2]), array([*start, 3, 3])]
    drafter = drafts.begin(array([7]), {"previous": answers})
    drafter.append(start)
    draft = drafter.propose(2)
    assert draft is not None and draft.tokens == [3, 3]
    drafter = drafts.begin(array([7]), {"previous": [*answers, array([*start, 1, 4])]})
    drafter.append(start)
    draft = drafter.propose(2)
    assert draft is not None and draft.tokens == [1, 4]


def test_siblings_are_answers_to_the_same_prompt() -> None:
    """Fault: an answer to another prompt counts as a sibling, the prompt is drafted, or a sibling is forgotten."""
    drafts = Drafts(["siblings"], PLENTY)
    prompt, answer = drawn(40), drawn(20)
    drafts.add(array(prompt + answer), len(prompt), 0)
    assert drafts.begin(array(drawn(40)), {}).propose(16) is None
    assert drafts.begin(array(prompt[:-1]), {}).propose(16) is None
    draft = drafts.begin(array(prompt), {}).propose(16)
    assert draft is not None and draft.source == "siblings" and draft.tokens == answer[: len(draft.tokens)]


def test_sources_not_in_use_give_nothing() -> None:
    """Fault: a source that was switched off is drafted from or holds memory."""
    prompt = drawn(10) * 3
    for used in DRAFT_SOURCES:
        drafts = Drafts([used], PLENTY)
        drafts.add(array(prompt + [5, 6]), len(prompt), 0)
        references: dict[DraftSource, list[TokenArray]] = {"recorded": [array([1, 2])], "previous": [array([3, 4])]}
        draft = drafts.begin(array(prompt), references).propose(1)
        expected = {"recorded": 1, "previous": 3, "siblings": 5, "history": 5, "lookup": prompt[0]}
        assert draft is not None and draft.source == used
        assert draft.tokens == [expected[used]] or used == "history" and draft.tokens == [prompt[0]]
        assert (drafts.held_bytes > 0) == (used in ("siblings", "history"))


def test_random_tokens_waste_fewer_than_a_row_in_a_hundred() -> None:
    """Fault: chance matches of a small vocabulary continue being drafted though they never hold."""
    for _ in seeds(20):
        drafts = Drafts(["lookup", "history", "siblings", "previous"], PLENTY)
        passes = drafted = 0
        for _ in range(60):
            vocabulary = random.choice([64, 256, 4096])
            prompt, answer = drawn(300, vocabulary), drawn(300, vocabulary)
            drafter = drafts.begin(array(prompt), {"previous": [array(drawn(300, vocabulary))]})
            done = decode(drafter, answer, 0.05)
            passes, drafted = passes + done[0], drafted + done[1] - done[2]
            drafts.add(array(prompt + answer), len(prompt), 0)
        assert drafted < 0.01 * (passes + drafted)


def test_drafting_recovers_after_random_tokens() -> None:
    """Fault: a source that was useless for long is never tried again."""
    drafts = Drafts(["lookup"], PLENTY)
    for _ in range(5):
        decode(drafts.begin(array(drawn(500, 64)), {}), drawn(500, 64), 0.05)
    text = drawn(100)
    drafter = drafts.begin(array(text), {})
    decode(drafter, text * 3, 0.05)
    passes, _, accepted = decode(drafter, text, 0.05)
    assert accepted > 80 and passes < 20


def test_reach_never_rises_and_most_is_kept() -> None:
    """Fault: a draft is longer than asked, or its reach is no product of probabilities."""
    for _ in seeds(50):
        drafts = Drafts(["lookup", "history"], PLENTY)
        vocabulary = random.choice([2, 5, 50])
        drafter = drafts.begin(array(drawn(200, vocabulary)), {})
        for _ in range(100):
            most = random.randrange(80)
            draft = drafter.propose(most)
            if draft is not None:
                assert 0 < len(draft.tokens) == len(draft.reach) <= min(most, 64)
                assert all(1 >= a >= b >= 0.02 for a, b in zip([1.0, *draft.reach], draft.reach, strict=False))
            drafter.append(drawn(random.randrange(4), vocabulary))


def test_token_ids_are_checked() -> None:
    """Fault: an id that is no token ends a text of the index, or is cut to 32 bits."""
    drafter = Drafts(["lookup"], PLENTY).begin(array([2**31 - 1, 0, 1, 2**31 - 1, 0]), {})
    draft = drafter.propose(1)
    assert draft is not None and draft.tokens == [1]
    drafter.append(np.array([1], dtype=np.int32))
    draft = drafter.propose(1)
    assert draft is not None and draft.tokens == [2**31 - 1]
    with pytest.raises(OverflowError):
        drafter.append([3, -1])
    with pytest.raises(TypeError):
        drafter.append([2**31])
    assert drafter.propose(1) == draft


def test_a_long_prompt_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: each running answer indexes its whole prompt, however long it and however short the answer may be."""
    monkeypatch.setattr(drafter_module, "MOST_LOOKUP", 100)
    *sizes, of_one_token = [
        Drafts(["lookup"], PLENTY).begin(array(drawn(length)), {}, most).held_bytes
        for length, most in ((100, 9), (101, 9), (5000, 9), (5000, 4), (5000, 1))
    ]
    assert len(set(sizes)) == 1 and of_one_token < sizes[0]
    tail = drawn(90)
    draft = Drafts(["lookup"], PLENTY).begin(array(drawn(3000) + tail + [7, 8] + tail), {}).propose(4)
    assert draft is not None and draft.tokens[:2] == [7, 8]
