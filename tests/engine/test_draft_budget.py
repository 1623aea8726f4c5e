"""What a row of a pass is taken to cost, and which drafted tokens get rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from apcbatch import Request
from apcbatch.drafts.drafter import Draft
from apcbatch.engine.drafting import MARGIN, Drafting
from apcbatch.engine.policy import Nothing
from apcbatch.engine.row_costs import RowCosts
from apcbatch.engine.sequence import Chunk, make_sequence
from tests.effort import seeds
from tests.engine.scripted_drafts import make_rows_free
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
    request = Request("a", [1, 2, 3], max_tokens=90)
    sequence = make_sequence(request, VOCAB, None)
    sequence.retention = Nothing(request, 3, 1)
    sequence.drafter, sequence.num_fed = Fixed(reach), 3  # type: ignore[assignment]
    return Chunk(sequence, begin=2, count=1)


def drafted(
    reaches: Sequence[Sequence[float]], seconds: Callable[[int], float], most: int = 1000, num_slots: int = 1000
) -> list[int]:
    """Tokens that each chunk's draft gets."""
    drafting = Drafting(object(), None, range(num_slots), most)  # type: ignore[arg-type]
    make_rows_free(drafting, seconds)
    chunks = [decoding(reach) for reach in reaches]
    drafting.add_drafts(chunks)
    slots = [slot for chunk in chunks for slot in chunk.draft_slots]
    assert len(set(slots)) == len(slots) == num_slots - len(drafting._slots)
    for chunk in chunks:
        assert chunk.draft == DRAFTED[: len(chunk.draft)] and len(chunk.draft_slots) == len(chunk.draft)
    return [len(chunk.draft) for chunk in chunks]


def free(rows: int) -> float:
    return 1.0


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


@pytest.mark.parametrize(("most", "num_slots"), [(3, 1000), (1000, 3), (0, 1000), (1000, 0)])
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


def test_costs_before_the_first_pass() -> None:
    """Fault: rows that seem free or dear before any was measured, so that none, or too many, are tried."""
    costs = RowCosts()
    assert 0 < costs.of(1) < costs.of(2) < costs.of(64) < 100 * costs.of(1)


def test_costs_are_those_measured_and_between_them_interpolated() -> None:
    """Fault: another number of rows than the measured one, or a jump between two."""
    costs = RowCosts()
    for _ in range(5):
        costs.add(4, 2.0)
        costs.add(12, 4.0)
    assert costs.of(4) == pytest.approx(2.0) and costs.of(12) == pytest.approx(4.0)
    assert costs.of(8) == pytest.approx(3.0, rel=0.1)
    assert costs.of(1) <= 2.0 and costs.of(13) >= 4.0


def test_costs_never_fall_with_rows() -> None:
    """Fault: a disturbed pass of few rows, after which more rows seem to cost less."""
    for seed in seeds(100):
        draw, costs = random.Random(seed), RowCosts()
        for _ in range(draw.randrange(1, 60)):
            costs.add(draw.randrange(1, 30), draw.choice([0.5, 1, 1.1, 30]))
        found = [costs.of(rows) for rows in range(1, 40)]
        assert found == pytest.approx(sorted(found), rel=1e-12) and found[0] > 0


def test_one_disturbed_pass_counts_little() -> None:
    """Fault: a pass that waited for another program, after which nothing is drafted."""
    costs = RowCosts()
    for _ in range(20):
        costs.add(5, 1.0)
    costs.add(5, 1000.0)
    assert costs.of(5) < 2


def test_costs_follow_what_changes() -> None:
    """Fault: passes of long ago, beside other work or a shorter context, that decide for ever."""
    costs = RowCosts()
    for seconds in (5.0, 1.0, 5.0):
        for _ in range(600):
            costs.add(3, seconds)
            costs.add(9, 2 * seconds)
        assert costs.of(3) == pytest.approx(seconds, rel=0.1) and costs.of(9) == pytest.approx(2 * seconds, rel=0.1)


def test_the_seconds_saved_are_those_beyond_passes_without_drafts() -> None:
    """Fault: what drafts cost is told as saved, a pass with prompts counts, or tokens of one answer count for all."""
    drafting = Drafting(object(), None, range(9), 9)  # type: ignore[arg-type]
    one, other, prompt = decoding([]), decoding([]), decoding([])
    for chunk in (one, other):
        chunk.sequence.computed = chunk.sequence.num_prompt
    for _ in range(3):
        drafting.measure([one, other], 2.0)
        drafting.measure([one, prompt], 50.0)
    assert drafting.saved_s is None, "no draft yet"
    one.draft, one.accepted = [1, 2, 3], 2
    drafting.measure([one, other], 3.0)  # four tokens of two answers: two passes of 2 s
    assert drafting.saved_s == pytest.approx(1.0)
    one.accepted = 0
    drafting.measure([one, other], 3.0)
    assert drafting.saved_s == pytest.approx(0.0)
