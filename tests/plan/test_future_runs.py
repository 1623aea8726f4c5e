"""What is kept for future runs, against its definition: the ends of conversations and the prefixes they
share."""

from __future__ import annotations

import random

from apcbatch.plan.planner import Plan, Planner
from tests.effort import tries
from tests.plan.plan_oracle import HYBRID, STATE_ONLY, Dataset, Prompt, dataset, make_plan, random_dataset, random_held

BLOCKS = [1, 2, 3, 5, 8, 64]


def stems_and_ends(data: Dataset, block_size: int) -> set[Prompt]:
    """The positions worth keeping for later, by definition."""
    found = set()
    for conversation in set(data.conversations):
        last = [p for p, c in zip(data.prompts, data.conversations, strict=True) if c == conversation][-1]
        found.add(last[: (len(last) - 1) // block_size * block_size])
    for prefix in {p[:end] for p in data.prompts for end in range(1, len(p))}:
        below = [
            (p[len(prefix)], c)
            for p, c in zip(data.prompts, data.conversations, strict=True)
            if p[: len(prefix)] == prefix and len(p) > len(prefix)
        ]
        through = {c for p, c in zip(data.prompts, data.conversations, strict=True) if p[: len(prefix)] == prefix}
        if len({token for token, _ in below}) > 1 and len(through) > 1:
            found.add(prefix[: len(prefix) // block_size * block_size])
    return found - {()}


def kept_for_later(data: Dataset, plan: Plan) -> dict[Prompt, int]:
    """By prefix, who keeps it."""
    found: dict[Prompt, int] = {}
    for index, todo in enumerate(plan.requests):
        for position in todo.keep_for_later:
            assert todo.resume_at < position <= len(data.prompts[index]), data.where
            assert data.prompts[index][:position] not in found, "kept twice"
            found[data.prompts[index][:position]] = index
    return found


def nearest_above(prefix: Prompt, others: set[Prompt]) -> int:
    return max((len(o) for o in others if len(o) < len(prefix) and prefix[: len(o)] == o), default=0)


def test_for_later_the_stems_and_the_ends_are_kept(data: Dataset) -> None:
    """Catches a conversation or a shared prefix that the next run would not find, and a keeper that does not
    compute it."""
    for block_size in BLOCKS:
        plan = make_plan(data, Planner(block_size, later_budget_bytes=None, footprint=HYBRID))
        kept, expected = kept_for_later(data, plan), stems_and_ends(data, block_size)
        assert set(kept) == expected, (data.where, block_size)
        this_run = {data.prompts[i][:b] for i, todo in enumerate(plan.requests) for b in todo.keep}
        num_bytes = sum(100 + 3 * (len(p) - nearest_above(p, expected)) for p in expected)
        assert plan.for_later == {block_size: (len(expected - this_run), num_bytes)}, (data.where, block_size)
        for prefix, owner in kept.items():
            first = next(i for i in plan.order if data.prompts[i][: len(prefix)] == prefix)
            assert owner == first, (data.where, block_size)


def test_for_later_the_gain_and_the_budget_hold(data: Dataset) -> None:
    """Catches a snapshot that saves less than asked for, more bytes than allowed, and a budget that is
    counted wrong."""
    for block_size, min_gain in ((1, 4), (3, 1), (3, 7)):
        free = make_plan(data, Planner(block_size, "short first", HYBRID, None, min_gain, None))
        most = free.for_later[block_size].num_bytes
        for budget in (0, most // 3, most - 1, most):
            plan = make_plan(data, Planner(block_size, "short first", HYBRID, None, min_gain, max(budget, 0)))
            kept = set(kept_for_later(data, plan))
            gains = {prefix: len(prefix) - nearest_above(prefix, kept) for prefix in kept}
            where = (data.where, block_size, min_gain, budget)
            assert all(gain >= min_gain for gain in gains.values()), where
            written = plan.for_later[block_size].num_bytes
            assert written == sum(100 + 3 * gain for gain in gains.values()) <= max(budget, 0), where
            assert kept <= stems_and_ends(data, block_size), where
            if budget == most:  # the last one that is left is worth all of its tokens
                assert bool(kept) == any(len(p) >= min_gain for p in stems_and_ends(data, block_size)), where


def test_for_later_what_the_store_has_is_not_written_again() -> None:
    """Catches a snapshot that is paid for twice, or kept beside a held one that is nearly as good."""
    num_kept = []
    for _ in range(tries(300)):
        data = random_dataset(random.getrandbits(32))
        held = random_held(data, 2)
        plan = make_plan(data, Planner(2, "short first", STATE_ONLY, None, 5, None), held)
        kept = set(kept_for_later(data, plan))
        assert not kept & held, data.where
        assert all(len(p) - nearest_above(p, kept | held) >= 5 for p in kept), data.where
        num_kept.append(len(kept))
    assert any(num_kept)


def test_for_later_the_stem_outlives_the_ends() -> None:
    """Catches a budget spent on conversations' ends while the prefix of all of them, which saves less once, is
    dropped."""
    prefix = list(range(20))
    data = dataset(*[[*prefix, *[1000 + i] * 61] for i in range(10)])
    plan = make_plan(data, Planner(10, later_budget_bytes=25, footprint=STATE_ONLY))
    assert sorted(len(prefix) for prefix in kept_for_later(data, plan)) == [20, 80]


def test_for_later_what_is_dropped_makes_the_next_worth_more() -> None:
    """Catches values from before a snapshot above was dropped: then the end of 20 + 2 tokens beats the one of
    21."""
    data = dataset(range(3), range(23), range(100, 122))
    plan = make_plan(data, Planner(1, later_budget_bytes=10, footprint=STATE_ONLY))
    assert set(kept_for_later(data, plan)) == {tuple(range(22))}


def test_for_later_two_dropped_in_a_row_leave_all_tokens_to_the_next() -> None:
    """Fault: after two dropped ancestors a snapshot's bytes are still counted from the first one, so the plan writes
    more than its budget. Candidates at 10, 15 and 200 tokens; 15 goes first, then 10."""
    data = dataset(range(11), range(16), range(201))
    plan = make_plan(data, Planner(1, later_budget_bytes=700, footprint=HYBRID))
    assert set(kept_for_later(data, plan)) == {tuple(range(200))} and plan.for_later[1].num_bytes == 700


def test_for_later_what_nobody_computes_is_not_promised() -> None:
    """Catches a prefix that all requests resume beyond, as the store has their ends: no request keeps it."""
    data = dataset([*range(10), *[20] * 10], [*range(10), *[30] * 10])
    plan = make_plan(data, Planner(2, later_budget_bytes=None), {prompt[:18] for prompt in data.prompts})
    assert [todo.resume_at for todo in plan.requests] == [18, 18]
    assert (kept_for_later(data, plan), plan.for_later) == ({}, {2: (0, 0)})
