"""What a row of a pass is taken to cost, and which drafted tokens get rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from apcbatch import Request
from apcbatch.drafts.drafter import Draft, Drafts
from apcbatch.engine.drafting import LONGEST_PAUSE, MARGIN, PLAIN_CYCLE, PLAIN_RUN, WINDOW, Drafting
from apcbatch.engine.policy import Nothing
from apcbatch.engine.row_costs import RowCosts
from apcbatch.engine.sequence import AnswerDrafts, Chunk, make_sequence
from apcbatch.model.graphs import GraphedLM
from tests.effort import seeds, table
from tests.engine.opened import rows_take
from tests.tiny import VOCAB

DRAFTED = list(range(1, VOCAB))


class Fixed:
    """A drafter whose drafted tokens are reached with these probabilities."""

    def __init__(self, reach: Sequence[float]) -> None:
        self._reach = list(reach)

    def propose(self, most: int) -> Draft | None:
        reach = self._reach[:most]
        return Draft(DRAFTED[: len(reach)], reach, "lookup") if reach else None


def decoding(reach: Sequence[float]) -> Chunk:
    """A decode chunk with a draft."""
    request = Request("a", [1, 2], max_tokens=91)
    sequence = make_sequence(request, VOCAB, None)
    sequence.append(3, 0.0)
    sequence.retention = Nothing(request, 2, 1)
    sequence.drafts = AnswerDrafts(Fixed(reach), 3)  # type: ignore[arg-type]
    return Chunk(sequence, begin=2, count=1)


def prompt() -> Chunk:
    """A chunk of a prompt."""
    return Chunk(make_sequence(Request("a", [1, 2, 3]), VOCAB, None), begin=0, count=3)


def forced(tokens: list[int]) -> Chunk:
    """A decode chunk whose grammar forces these tokens."""
    chunk = decoding([])
    chunk.sequence.sampler = SimpleNamespace(forced=lambda: iter(tokens))  # type: ignore[assignment]
    return chunk


def has_pages(chunk: Chunk, count: int) -> bool:
    return True


def drafted(
    reaches: Sequence[Sequence[float]], seconds: Callable[[int], float], most: int = 1000, num_slots: int = 1000
) -> list[int]:
    """Tokens that each chunk's draft gets."""
    with rows_take(seconds):
        drafting = Drafting(object(), None, range(num_slots), most)  # type: ignore[arg-type]
    chunks = [decoding(reach) for reach in reaches]
    drafting.add_drafts(chunks, has_pages)
    slots = [slot for chunk in chunks for slot in chunk.draft_slots]
    assert len(set(slots)) == len(slots) == num_slots - len(drafting.free_slots)
    for chunk in chunks:
        assert chunk.draft == DRAFTED[: len(chunk.draft)] and len(chunk.draft_slots) == len(chunk.draft)
    return [len(chunk.draft) for chunk in chunks]


def free(rows: int) -> float:
    return 1.0


class Timed(Drafting):
    """Drafting whose passes take as long as a test says. now: what its clock shows."""

    def __init__(self, most: int = 9, index: Any = None, model: Any = None) -> None:
        self.now = self.last = 0.0
        super().__init__(index or object(), model, range(most), most, lambda: self.now)

    def passed(self, chunks: list[Chunk], seconds: float) -> None:
        """Settle a pass that took these seconds."""
        for chunk in chunks:
            chunk.draft_slots = chunk.draft_slots or [0] * len(chunk.draft)
        self.now = self.last = self.last + seconds
        self.settle(chunks)


class Priced(Drafting):
    """Drafting that tells with which probability it takes each token of a draft to be reached: a row is worth it from
    there on."""

    def __init__(self, most: int = 9) -> None:
        self.seconds: list[float] = []
        with rows_take(lambda rows: self.seconds[rows]):
            super().__init__(object(), None, range(most), most)  # type: ignore[arg-type]

    def draft(self, chunk: Chunk, *seconds: float) -> list[int]:
        """The tokens that are drafted where rows take these seconds, and further ones none."""
        self.seconds, chunk.draft = [0.0, *seconds] + [seconds[-1]] * 99, []
        self.add_drafts([chunk], has_pages)
        self.release(chunk)
        return chunk.draft

    def check_reach(self, chunk: Chunk, *expected: float) -> None:
        """Each token is drafted where its row costs a little less than it brings, and not where it costs more."""
        for place, reach in enumerate(expected):
            before = 1 + sum(expected[:place])
            for more, count in ((-1e-4, place + 1), (1e-4, place)):
                row = (before + reach + more) / before / (1 if place else MARGIN)
                assert len(self.draft(chunk, *[1.0] * (1 + place), row, 1e9)) == count, (place, reach + more)


def test_all_drafts_where_rows_are_free() -> None:
    """Fault: a drafted token left out that costs nothing."""
    assert drafted([[0.5, 0.1], [0.01], []], free) == [2, 1, 0]


def test_no_drafted_token_where_a_row_costs_as_much_as_it_brings() -> None:
    """Fault: a run that is slower with drafts than without."""
    assert drafted([[0.99, 0.9], [0.99]], lambda rows: rows) == [0, 0]


def test_the_likeliest_drafts_come_first() -> None:
    """Fault: rows for the first sequence, or for each one alike, in place of the tokens likeliest to be reached."""
    limited: Callable[[int], float] = lambda rows: 1.0 if rows <= 7 else 100.0  # noqa: E731
    assert drafted([[0.5, 0.4, 0.1], [0.9, 0.8, 0.7], [0.3]], limited) == [1, 3, 0]
    assert drafted([[0.9] * 9, [0.8] * 9, [0.7]], limited) == [4, 0, 0]


@table("most, num_slots", [(3, 1000), (1000, 3), (0, 1000), (1000, 0)])
def test_no_more_drafts_than_a_pass_holds(most: int, num_slots: int) -> None:
    """Fault: more drafted tokens than the pass keeps inputs of, or than there are slots for their states."""
    expected = [2, 1] if most and num_slots else [0, 0]
    assert drafted([[0.9, 0.5, 0.4], [0.8, 0.3]], free, most, num_slots) == expected


def test_the_best_of_all_choices_is_taken() -> None:
    """Fault: a choice that gives fewer expected tokens a second than another one; costs may jump anywhere."""
    for seed in seeds(300):
        draw = random.Random(seed)
        reaches = [sorted((draw.random() for _ in range(draw.randrange(5))), reverse=True) for _ in range(3)]
        costs = [0.0, *itertools.accumulate(draw.choice([0.01, 0.2, 1, 3]) for _ in range(20))]
        most = draw.choice([2, 5, 1000])

        def rate(counts: Sequence[int], reaches: list[list[float]] = reaches, costs: list[float] = costs) -> float:
            expected = 3 + sum(sum(reach[:count]) for reach, count in zip(reaches, counts, strict=True))
            return expected / costs[3 + sum(counts)]

        choices = itertools.product(*(range(len(reach) + 1) for reach in reaches))
        best = max(rate(counts) for counts in choices if sum(counts) <= most)
        best = best if best > MARGIN * rate([0, 0, 0]) else rate([0, 0, 0])
        assert rate(drafted(reaches, costs.__getitem__, most)) == pytest.approx(best, rel=1e-12)


@table(
    "samples, costs",
    [
        ([], {1: 1.02, 10: 1.2}),
        ([(10, 2.0)], {5: 2 / 1.1, 10: 2.0, 15: 2.2}),
        ([(96, 2.0)], {48: 2 / 1.125, 96: 2.0, 144: 2.25}),
        ([(4, 1.0)] * 4 + [(4, 9.0)] * 4, {4: 9.0}),  # the median of seven
        ([(4, 1.0)] * 4 + [(4, 9.0)] * 3, {4: 1.0}),
        ([(2, 4.0)] * 3 + [(4, 2.0)], {2: 3.5, 3: 3.5, 4: 3.5}),
        ([(1, 6.0), (2, 3.0), (2, 3.0), (3, 1.0), (5, 7.0)], {1: 3.25, 2: 3.25, 3: 3.25, 4: 5.125, 5: 7.0}),
        ([(17, 2.0), (18, 4.0), (33, 6.0)], {18: 3.0, 27: 4.5, 36: 6.0}),  # in steps of two, then of four
        ([(3, 1.0), (9, 2.0)] + [(3, 1.0)] * 511, {3: 1.0, 9: 2.0}),
        ([(3, 1.0), (9, 2.0)] + [(3, 1.0)] * 512, {3: 1.0, 9: 1.12}),
    ],
)
def test_costs_by_hand(samples: list[tuple[int, float]], costs: dict[int, float]) -> None:
    """Fault: a sample too many or too few, a pool by the number of row counts, a row count kept too long."""
    found = RowCosts()
    for rows, seconds in samples:
        found.add(rows, seconds)
        found.of(1)
    assert {rows: found.of(rows) for rows in costs} == pytest.approx(costs)


@table("passes", [511, 512])
def test_costs_that_nothing_confirms_expire(passes: int) -> None:
    """Fault: a row count that seemed slow once is never tried again, or its seconds are used after it is dropped."""
    costs = RowCosts()
    costs.add(3, 9.0)
    assert costs.of(3) == 9.0
    for _ in range(passes):
        costs.age()
    assert bool(costs) == (passes < 512) and costs.of(3) == pytest.approx(9.0 if costs else 1.06)


@table("count, near", [(2, [1, 2, 3]), (9, [8, 9, 10, 11, 12])])
def test_a_row_count_is_known_by_its_neighbours(count: int, near: list[int]) -> None:
    """Fault: a pass without drafts is measured again and again, or taken for known by two samples or a far one."""
    costs = RowCosts()
    for _ in range(3):
        assert not costs.knows(count)
        costs.add(count, 1.0)
    assert [rows for rows in range(1, 20) if costs.knows(rows)] == near


def test_passes_are_plain_in_a_row_until_their_seconds_are_known() -> None:
    """Fault: drafts whose gain nobody can tell, since no pass without them is measured; or plain passes for ever."""
    drafting = Timed()

    def counts() -> list[int]:
        found = []
        for _ in range(32):
            chunk = decoding([0.9])
            drafting.add_drafts([chunk], has_pages)
            found.append(len(chunk.draft))
            drafting.release(chunk)
            drafting.passed([prompt()], 1.0)  # counted, not measured
        return found

    assert counts() == ([0] * 4 + [1] * 12) * 2
    plain = decoding([])
    for _ in range(4):
        drafting.passed([plain], 0.01)
    assert counts() == [1] * 32, "two rows are taken to cost about as much as one"
    plain.draft = [1]
    drafting.passed([plain], 0.02)
    assert counts() == [0] * 32


@table("between", ["drafts", "prompt"])
def test_a_plain_pass_is_measured_after_another(between: str) -> None:
    """Fault: a pass whose batch is made anew, after one with drafts or prompts, tells what plain passes cost."""
    drafting, plain, other = Timed(), decoding([]), prompt()
    if between == "drafts":
        other = decoding([])
        other.draft = [1]
    for _ in range(9):
        drafting.passed([other], 1.0)
        drafting.passed([plain], 9.0)
    assert (bool(drafting.plain_costs), bool(drafting.costs)) == (False, between == "drafts")
    drafting.passed([plain], 2.0)
    assert drafting.plain_costs.of(1) == 2.0


def test_a_row_that_brings_no_speed_is_left_out() -> None:
    """Fault: a drafted token is verified though the tokens per second are the same without it."""
    assert drafted([[1.0, 0.5]], {1: 1.0, 2: 1.0, 3: 1.25}.__getitem__) == [1]


def test_drafts_without_pages_are_left_out() -> None:
    """Fault: a draft is verified whose keys have no page, or its rows and slots are counted though it is left out."""
    with rows_take(free):
        drafting = Drafting(object(), None, range(9), 9)  # type: ignore[arg-type]
    chunks, asked = [decoding([0.9] * 3) for _ in range(3)], []

    def has_pages(chunk: Chunk, count: int) -> bool:
        asked.append((chunk, count))
        return chunk is not chunks[1]

    drafting.add_drafts(chunks, has_pages)
    assert asked == [(chunk, 3) for chunk in chunks] and [len(chunk.draft_slots) for chunk in chunks] == [3, 0, 3]
    assert [len(chunk.draft) for chunk in chunks] == [3, 0, 3] and chunks[1].num_rows == 1


@table(
    "source, accepted, ended, reach",
    [("grammar", 3, False, 0.902), ("grammar", 1, False, 0.892), ("grammar", 1, True, 0.902),
     ("grammar", 0, False, 0.882), ("grammar", 0, True, 0.9), ("lookup", 0, False, 0.9)],
)  # fmt: skip
def test_only_tokens_that_were_sampled_say_how_far_a_grammar_is_right(
    source: str, accepted: int, ended: bool, reach: float
) -> None:
    """Fault: drafted tokens after the end of an answer, or after the first wrong one, count as wrong."""
    drafting, chunk = Priced(), decoding([])
    drafting.seconds = [1.0] * 9
    drafting.settle([chunk])
    assert drafting.counts == {}
    chunk.draft, chunk.draft_source, chunk.accepted = [1, 2, 3], source, accepted
    chunk.draft_slots = [0] * 3
    chunk.sequence.finish_reason = "stop" if ended else None
    drafting.settle([chunk])
    drafting.check_reach(forced([7]), reach)
    assert drafting.counts == {source: [3, accepted]}
    assert (chunk.sequence.drafts.drafted, chunk.sequence.drafts.accepted) == (3, accepted)


def test_a_pass_that_the_host_waited_for_is_no_plain_one() -> None:
    """Fault: passes that waited for drafts make those without drafts seem slow, or one such pass spoils the next."""
    drafting, chunk = Timed(), decoding([0.9])
    for _ in range(PLAIN_RUN):  # the passes that would be plain
        drafting.passed([prompt()], 1.0)
    chunk.draft = [1]
    drafting.passed([chunk], 1.0)
    assert drafting.saved_s is None, "nothing to compare with"
    chunk.draft = []
    assert drafting.is_promising([chunk.sequence])
    drafting.passed([chunk], 1.0)
    assert (bool(drafting.costs), bool(drafting.plain_costs)) == (True, False)
    drafting.passed([chunk], 1.0)
    assert drafting.plain_costs and drafting.saved_s is None, "after a pass without drafts"
    for _ in range(512):
        drafting.passed([chunk], 1.0)
    assert not drafting.costs, "each kind of pass ages the other's costs"


@table(
    "limit, kept, is_forked, most",
    [(90, [], False, 64), (68, [], False, 64), (67, [], False, 63), (5, [], False, 1), (4, [], False, 0),
     (3, [2], False, 0), (90, [10, 20], False, 6), (90, [67], False, 63), (90, [68], False, 64),
     (90, [3], False, 0), (90, [], True, 0)],
)  # fmt: skip
def test_how_long_a_draft_may_be(limit: int, kept: list[int], is_forked: bool, most: int) -> None:
    """Fault: a draft reaches the last token of an answer or a snapshot's position, or ends before it has to."""
    chunk = decoding([0.9] * 90)  # begins at 2
    chunk.sequence.limit = limit
    chunk.sequence.start = object() if is_forked else None  # type: ignore[assignment]
    retention = SimpleNamespace(kept=lambda begin, end: [one for one in kept if begin < one <= end])
    chunk.sequence.retention = retention  # type: ignore[assignment]
    assert Priced(most=90).draft(chunk, 1.0) == DRAFTED[:most]


def test_what_a_grammar_forces_is_drafted_as_far_as_it_may() -> None:
    """Fault: forced tokens beyond the bound are drafted, or the first of them is taken for certain."""
    drafting, chunk = Priced(), decoding([0.5, 0.4])
    chunk.sequence.limit = 5  # one token
    assert (drafting.draft(chunk, 1.0), chunk.draft_source) == ([1], "lookup")
    chunk = forced([7, 8, 9])
    for limit, tokens in ((6, [7, 8]), (4, [])):
        chunk.sequence.limit = limit
        assert drafting.draft(chunk, 1.0) == tokens and chunk.draft_source == "grammar"
    chunk.sequence.limit = 6
    drafting.check_reach(chunk, 0.9, 0.81)
    chunk.sequence.request = Request("a", [1, 2, 3], draft=False)
    assert drafting.draft(chunk, 1.0) == []


def test_what_an_answer_adds_to_the_index() -> None:
    """Fault: a prompt is indexed for each of its answers."""
    added: list[tuple[list[int], int, int]] = []
    drafting = Timed(index=SimpleNamespace(add=lambda *given: added.append(given)))
    known: Any = {"tokens": [1, 2, 3, 4, 0], "num_tokens": 4, "num_prompt": 3, "drafts": AnswerDrafts(num_covered=2)}
    answers: Any = [SimpleNamespace(answer=answer, **known) for answer in range(2)]
    drafting.learn(answers)
    assert added == [([1, 2, 3, 4], 3, 2), ([1, 2, 3, 4], 3, 3)]


def test_a_pass_that_captures_a_graph_is_no_sample() -> None:
    """Fault: rows that seem dear for ever, since the first pass that had so many captured its graph."""
    model, chunk = MagicMock(GraphedLM, num_graphs=0), decoding([])
    drafting = Timed(model=model)
    for seconds, captured in ((1.0, 0), (30.0, 1), (30.0, 2), (50.0, 3), (1.0, 3), (1.0, 3)):
        model.num_graphs = captured
        drafting.passed([chunk], seconds)
    for costs in (drafting.costs, drafting.plain_costs):
        assert not costs or costs.of(1) == 1.0
    assert drafting.plain_costs


def test_costs_never_fall_with_rows() -> None:
    """Fault: a disturbed pass of few rows, after which more rows seem to cost less."""
    for seed in seeds(100):
        draw, costs = random.Random(seed), RowCosts()
        for _ in range(draw.randrange(1, 60)):
            costs.add(draw.randrange(1, 30), draw.choice([0.5, 1, 1.1, 30]))
        found = [costs.of(rows) for rows in range(1, 40)]
        assert found == pytest.approx(sorted(found), rel=1e-12) and found[0] > 0


def test_the_seconds_saved_are_those_beyond_passes_without_drafts() -> None:
    """Fault: what drafts cost is told as saved, a pass with prompts counts, or tokens of one answer count for all."""
    drafting, one, other = Timed(), decoding([]), decoding([])
    drafting.passed([one, prompt()], 50.0)
    for _ in range(4):
        drafting.passed([one, other], 2.0)
    assert drafting.saved_s is None, "no draft yet"
    one.draft, one.accepted = [1, 2, 3], 2
    drafting.passed([one, other], 3.0)  # four tokens of two answers: two passes of 2 s
    assert drafting.saved_s == pytest.approx(1.0)
    one.accepted = 0
    drafting.passed([one, other], 3.0)
    assert drafting.saved_s == pytest.approx(0.0)


def test_a_search_that_does_not_pay_pauses() -> None:
    """Fault: a small model is slowed by the search for drafts through a whole run, a pause never ends or does not grow,
    or one that follows windows that paid is a long one."""
    chunk = decoding([])
    chunk.sequence.drafts.drafter.propose = search = MagicMock(return_value=None)  # type: ignore[union-attr]

    def passes(search_s: float, drafted: int = 0) -> int:
        """Run a window. Return the number of passes until the next search."""

        def searched(most: int) -> None:
            drafting.now += search_s

        search.side_effect = searched
        for _ in range(WINDOW):
            drafting.add_drafts([chunk], has_pages)
            drafting.passed([chunk], 1.0 + search_s)
        assert drafting.plain_costs.of(1) == pytest.approx(1.0), "without the search"
        search.reset_mock()
        paused = 0
        while not drafting.is_promising([chunk.sequence]) and not search.called:  # passes run ahead in a pause
            drafting.passed([chunk], 1.0)
            paused += 1
        return paused

    for search_s, paused in ((0.01, 0), (0.5, WINDOW)):  # the first is a loss that noise may be
        drafting = Timed()
        drafting.passed([chunk], 1.0)  # which follows no other
        assert passes(search_s) == paused
    assert passes(0.5) == 2 * WINDOW
    for _ in range(9):
        longest = passes(0.5)
    assert longest == LONGEST_PAUSE
    assert passes(0.0) == 0
    assert passes(0.5) == WINDOW


@table("num_sequences, has_prompts, accepted, num_passes", [
    (1, False, 0, WINDOW), (8, False, 0, WINDOW), (64, False, 0, PLAIN_CYCLE), (25, False, 0, 21),
    (64, True, 0, PLAIN_CYCLE), (64, True, 8, None),
])  # fmt: skip
def test_many_sequences_are_weighed_after_fewer_passes(
    num_sequences: int, has_prompts: bool, accepted: int, num_passes: int | None
) -> None:
    """Fault: a short run of many sequences ends before the search is weighed once; passes with prompts search for
    nothing and are not weighed, or what they accept is not."""
    drafting, chunks = Timed(most=999), [decoding([]) for _ in range(num_sequences)]

    def searched(most: int) -> None:
        drafting.now += 0.5

    search = MagicMock(side_effect=searched)
    chunks[0].sequence.drafts.drafter.propose = search  # type: ignore[union-attr]
    for _ in range(4):
        drafting.passed(chunks, 1.0)
    for number in range(1, 4 * WINDOW):
        search.reset_mock()
        drafting.add_drafts(chunks, has_pages)
        if not search.called:
            assert number - 1 + 3 == num_passes, "and the first one, which follows no other"
            return
        chunks[0].accepted = 8 * num_sequences if accepted else 0
        drafting.passed([*chunks, prompt()] if has_prompts else chunks, 1.5)
    assert num_passes is None


@pytest.mark.parametrize(("learning_s", "is_paused"), [(0.001, False), (0.5, True)])
def test_learning_counts_while_drafts_are_searched(learning_s: float, is_paused: bool) -> None:
    """Fault: indexing answers is free to the search, or goes on in a pause; or what it took there ends each window
    after it at once, so that drafts are off for good; or a busy machine's time counts."""
    num_indexed = 0

    def indexed(*_: object) -> None:
        nonlocal num_indexed
        drafting.now += learning_s
        num_indexed += 1

    drafting, chunk = Timed(index=SimpleNamespace(add=indexed)), decoding([])
    ended: Any = SimpleNamespace(answer=0, tokens=[1, 2], num_tokens=2, num_prompt=1, drafts=AnswerDrafts())

    def passes(count: int) -> None:
        for _ in range(count):
            drafting.passed([chunk], 1.0)
            drafting.learn([ended])

    passes(1 + WINDOW)  # the first one follows no other
    asked = [decoding([0.9]).sequence]
    assert drafting.is_promising(asked) != is_paused
    num_indexed = 0
    while not drafting.is_promising(asked):
        passes(1)
    assert num_indexed == 3 * is_paused, "0.64 s of 64 passes are for indexing, which takes 0.5; one is after the pause"
    learning_s = 0.0
    passes(WINDOW)
    assert drafting.is_promising(asked), "what was learnt in the pause is not the window's loss"


def test_answers_of_earlier_runs_are_drafted_from() -> None:
    """Fault: a resumed run learns nothing from what it has answered before, or fails without drafts."""
    added: list[tuple[Any, ...]] = []
    index: Any = SimpleNamespace(add=lambda *given: added.append(given), held_bytes=7)
    nothing: Any = None
    drafting, without = Drafting(index, nothing, (), 0), Drafting(Drafts((), 0), nothing, (), 0)
    text: Any = [1, 2]
    drafting.add_text(text)
    without.add_text(text)
    assert added == [([1, 2], 0, 0)] and (drafting.held_bytes, without.held_bytes) == (7, 0)
    without.settle([decoding([])])
    assert not without.costs and not without.plain_costs and not without.is_promising([decoding([0.9]).sequence])
