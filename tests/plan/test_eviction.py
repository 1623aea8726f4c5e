"""What is dropped where memory is short, against the definition played through over plain tuples of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from apcbatch.plan.eviction import FIRST_ROWS
from apcbatch.plan.planner import Planner
from tests.effort import tries
from tests.plan.plan_oracle import STATE_ONLY, Dataset, Prompt, dataset, make_plan, random_dataset, serve

BYTES = STATE_ONLY.state_bytes


class Undecided(Exception):
    """Two snapshots are worth the same: either may go."""


def deepest(live: Sequence[Prompt], prompt: Prompt) -> Prompt:
    """The longest live prefix that a prompt can resume from; () for none."""
    return max((p for p in live if len(p) < len(prompt) and prompt[: len(p)] == p), key=len, default=())


def least(live: list[Prompt], later: Sequence[Prompt], start: Prompt) -> Prompt:
    """The live prefix that saves the fewest tokens a request until its next use; `later` begins with the next one."""
    serving = [deepest(live, prompt) for prompt in later]
    worth = {
        one: (len(one) - len(deepest(live, one))) / (serving.index(one) + 1) if one in serving else 0.0
        for one in live
        if one != start
    }
    lowest = min(worth.values(), default=None)
    found = [one for one, value in worth.items() if value == lowest]
    if len(found) > 1:
        raise Undecided
    return found[0]


def resumes(data: Dataset, order: Sequence[int], room: int) -> list[int]:
    """Where each request resumes, with room for this number of snapshots."""
    wanted = {p for p in serve(data, order, 1, "all").read if p}
    prompts, live, found = [data.prompts[index] for index in order], [], {}
    for rank, (index, prompt) in enumerate(zip(order, prompts, strict=True)):
        start, later = deepest(live, prompt), prompts[rank + 1 :]
        found[index] = len(start)
        for one in sorted((p for p in wanted if prompt[: len(p)] == p and len(p) > len(start)), key=len, reverse=True):
            uses = [other for other in later if other[: len(one)] == one and len(other) > len(one)]
            if any(deepest(live, other) == start for other in uses):
                live.append(one)
        while len(live) > room and live != [start]:
            live.remove(least(live, later, start))
        live = [one for one in live if any(o[: len(one)] == one and len(o) > len(one) for o in later)]
    return [found[index] for index in range(len(prompts))]


@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_the_least_valuable_goes_first(room: int) -> None:
    """Catches a value that is not brought up to date when a snapshot comes or goes above, below or before its next
    use, and one dropped in the place of another."""
    compared = 0
    for _ in range(tries(450)):
        data = random_dataset(random.getrandbits(32))
        plan = make_plan(data, Planner(64, "file", STATE_ONLY, room * BYTES))
        try:
            expected = resumes(data, plan.order, room)
        except Undecided:
            continue
        compared += 1
        assert [todo.resume_at for todo in plan.requests] == expected, data.where
    assert compared


@pytest.mark.parametrize("room", [1, FIRST_ROWS - 1, FIRST_ROWS, FIRST_ROWS + 5, 4 * FIRST_ROWS])
def test_many_live_snapshots(room: int) -> None:
    """Catches a table of values that does not grow, or loses what is in it: equal prefixes go by their next use."""
    count = 4 * FIRST_ROWS + 1
    prefixes = [(number, 1000) for number in range(count)]
    data = dataset(*[(*prefix, 1) for prefix in prefixes], *[(*prefix, 2) for prefix in prefixes])
    plan = make_plan(data, Planner(2, "file", STATE_ONLY, room * BYTES))
    assert [todo.resume_at for todo in plan.requests[count:]] == [2] * room + [0] * (count - room)
    assert plan.peak_live_snapshots == room
