"""The plan against brute force: what is covered, where requests resume, which request keeps what for which, and what it
weighs."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Planner
from apcbatch.plan.tree_shape import ORDERS
from tests.plan.plan_oracle import (
    HYBRID,
    STATE_ONLY,
    Dataset,
    dataset,
    ideals,
    make_plan,
    numbers,
    random_dataset,
    random_held,
    replay,
    serve,
)

BLOCKS = [1, 2, 3, 5, 8, 64]


@pytest.mark.parametrize("order", ORDERS)
def test_a_plan_reaches_what_keeping_everything_would(data: Dataset, order: str) -> None:
    """Catches a token computed twice under any grid for later runs, a snapshot kept without a reader, a wrong
    owner or number of readers."""
    plan = make_plan(data, Planner(random.choice(BLOCKS), order))
    expected, where = serve(data, plan.order, 1, "all"), data.where
    resume_at = [expected.resume_at[i] for i in range(len(data.prompts))]
    assert [todo.resume_at for todo in plan.requests] == resume_at == [todo.ideal for todo in plan.requests], where
    assert plan.computed_tokens == sum(map(len, data.prompts)) - sum(resume_at), where
    assert dict(enumerate(todo.ideal for todo in plan.requests)) == ideals(data, plan.order), where
    kept = {
        data.prompts[index][:position]: (index, reads)
        for index, todo in enumerate(plan.requests)
        for position, reads in zip(todo.keep, todo.reads, strict=True)
    }
    assert kept == {p: (expected.owner[p], expected.read.count(p)) for p in set(expected.read)}, where
    assert plan.snapshots_written == plan.snapshots_read == len(kept), where


@pytest.mark.parametrize("footprint", [STATE_ONLY, HYBRID], ids=["mamba", "hybrid"])
def test_a_limit_on_memory_is_kept_and_the_plan_stays_exact(data: Dataset, footprint: Footprint) -> None:
    """Catches a request sent to a snapshot that is not there, one left over, a limit exceeded, room that is there but
    not used, and peaks that are not those of real pages."""
    for order in ORDERS:
        free = make_plan(data, Planner(64, order, footprint))
        peak = free.peak_live_bytes
        enough = 2 * peak if order == "long first" else peak
        for capacity in (0, int(0.3 * peak), int(0.6 * peak), peak - 1, enough):
            plan = make_plan(data, Planner(64, order, footprint, capacity))
            played = replay(data, plan, footprint)
            where = (data.where, order, capacity)
            assert played.peak_bytes == plan.peak_live_bytes <= max(0, capacity), where
            assert played.peak_snapshots == plan.peak_live_snapshots, where
            assert played.num_written == played.num_restored == plan.snapshots_written, where
            # Of a prompt that begins another one, long first computes the last token again.
            assert plan.cached_tokens <= free.cached_tokens + (order == "long first") * len(data.prompts), where
            assert capacity < enough or plan == free, where


@pytest.mark.parametrize("capacity", [None, 25])
def test_what_is_held_already_is_used(data: Dataset, capacity: int | None) -> None:
    """Catches a store's snapshots being computed again, kept again or passed by, and owners who resumed
    beyond."""
    for block_size in (1, 3, 5):
        held = random_held(data, block_size)
        for order in ORDERS:
            plan = make_plan(data, Planner(block_size, order, STATE_ONLY, capacity), held)
            where = (data.where, block_size, order)
            played = replay(data, plan, STATE_ONLY, held)
            assert played.num_restored == plan.snapshots_read, where
            assert dict(enumerate(todo.ideal for todo in plan.requests)) == ideals(data, plan.order, held), where
            if capacity is None:
                expected = serve(data, plan.order, 1, "all", held).resume_at
                assert dict(enumerate(todo.resume_at for todo in plan.requests)) == expected, where


def test_a_plan_is_the_same_every_time() -> None:
    """Catches an order of sets or hashes that leaks into the plan."""
    data = random_dataset(3)
    planner = Planner(3, "short first", HYBRID, 400, 2, 2000)
    assert make_plan(data, planner) == make_plan(data, planner)


def test_depth_first_needs_few_live_snapshots() -> None:
    """Catches branch snapshots that pile up: a binary tree of 256 prompts needs about log2 of them, not
    half."""
    data = dataset(*[[10 * level + (leaf >> level) % 2 for level in range(8)] for leaf in range(256)])
    random.Random(0).shuffle(data.prompts)
    assert make_plan(data, Planner(1, "short first")).peak_live_snapshots <= 9
    assert make_plan(data, Planner(1, "file")).peak_live_snapshots > 60


def test_a_caterpillar_needs_two() -> None:
    """Catches light subtrees being done after the heavy one: their branch snapshots would all wait."""
    spine = list(range(100))
    data = dataset(spine, *[[*spine[:end], 1000 + end] for end in range(1, 100)])
    assert make_plan(data, Planner(1, "short first")).peak_live_snapshots <= 3


def test_long_prompts_go_first_as_far_as_their_snapshots_leave_room() -> None:
    """Catches a chain of turns that is computed turn by turn, one that takes more than half of the memory, and tokens
    computed again for it."""
    spine = list(range(100))
    data = dataset(spine, *[[*spine[:end], 1000 + end] for end in range(1, 100)])
    for capacity, parts, live in [(None, 2, 65), (2000, 2, 65), (640, 4, 32), (120, 25, 6), (30, 100, 3)]:
        plan = make_plan(data, Planner(1, "long first", STATE_ONLY, capacity))
        assert len(set(plan.leaders)) <= parts + 1 and plan.peak_live_snapshots <= live, capacity
        assert plan.computed_tokens == plan.unique_tokens, capacity
        assert capacity is None or live == 3 or plan.peak_live_bytes <= capacity // 2
    same = [make_plan(data, Planner(1, order, STATE_ONLY, 0)).order for order in ("short first", "long first")]
    assert same[0] == same[1]


def test_stems_go_last() -> None:
    """Catches pure farthest-next-use: a prefix that every request falls back to is worth more than any end of a
    turn."""
    prefix = numbers(1000, 8)
    turns = [list(accumulate([numbers(40, 100 * c + t) for t in range(5)])) for c in range(20)]
    rounds = [prefix + [c] + turns[c][t] for t in range(5) for c in range(20)]
    data = dataset(*rounds, conversations=[i % 20 for i in range(100)])
    for room in (1, 2, 4):
        plan = make_plan(data, Planner(10, "file", STATE_ONLY, 10 * room))
        assert all(todo.resume_at >= 1000 for todo in plan.requests[1:]), room
    assert make_plan(data, Planner(10, "file", STATE_ONLY, 200)).cached_tokens > plan.cached_tokens


def test_what_is_dropped_leaves_the_one_above_it_on_the_same_edge() -> None:
    """Catches a request sent back to the start when two snapshots of one edge were live and the deeper one
    went."""
    data = dataset([*range(6), 9], range(6), [*range(6), 8])
    plan = make_plan(data, Planner(2, "file", STATE_ONLY, 10))
    assert [todo.resume_at for todo in plan.requests] == [0, 5, 5]


def test_bad_options_are_refused() -> None:
    """Catches a planner that continues with a grid of 0, an unknown order or snapshots without weight."""
    with pytest.raises(ValueError, match="block_size is 0"):
        Planner(0)
    with pytest.raises(ValueError, match="min_gain_tokens is 0"):
        Planner(1, min_gain_tokens=0)
    with pytest.raises(ValueError, match="order is 'random'"):
        Planner(1, "random")
    with pytest.raises(ValueError, match="has no weight"):
        Footprint(0)
