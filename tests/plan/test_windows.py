"""Windows of a run against plain Python: where they end, and what each hands on to the next."""

from __future__ import annotations

import random
from collections.abc import Collection

import numpy as np
import pytest

from apcbatch.plan import windows as module
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Plan, Planner
from apcbatch.plan.tree_shape import ORDERS
from apcbatch.plan.windows import REQUEST_TOKENS, Window, Windows
from tests.effort import tries
from tests.plan.plan_oracle import (
    HYBRID,
    STATE_ONLY,
    Dataset,
    Prompt,
    node_at,
    random_dataset,
    random_held,
    random_windows,
    serve,
)


def cut(lines: list[list[Prompt]], bound: int) -> list[Window[int]]:
    """The windows of lines with one or more prompts each; items count the requests."""
    windows, found = Windows[int](bound), []
    for line, prompts in enumerate(lines, start=1):
        for prompt in prompts:
            number = sum(window.num_requests for window in found) + len(windows)
            windows.add(number, line, np.array(prompt, np.int32), len(prompt) - 1)
            while windows.is_complete:
                found.append(windows.take())
    while len(windows):
        found.append(windows.take())
    return found


def test_a_window_ends_at_its_bound_with_a_whole_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bound that is off by one, shared tokens that count for each request, a line that is cut in two, a
    request that is lost or doubled between two windows, and a first window as large as the others."""
    first, second = tuple(range(100)), tuple(range(40)) + (7,) * 60
    lines = [[first[:60], first], [second], [(9,)], [(9, 9)], [(8,)]]
    one, two = 100 + 2 * REQUEST_TOKENS, 60 + REQUEST_TOKENS
    for bound, expected in (
        (1, [2, 1, 1, 1, 1]),
        (one, [2, 2, 2]),
        (one + 1, [3, 3]),
        (one + two, [3, 3]),
        (one + two + 1, [4, 2]),
        (10_000, [6]),
    ):
        found = cut(lines, bound)
        assert [window.num_requests for window in found] == expected, bound
        numbers = [number for window in found for number in window.items[: window.num_requests]]
        assert numbers == list(range(6)), bound
    monkeypatch.setattr(module, "FIRST_TOKENS", 1)
    assert [window.num_requests for window in cut(lines, 10_000)] == [2, 4]


def run(
    data: Dataset, windows: list[Window[int]], planner: Planner, stored: Collection[Prompt] = ()
) -> tuple[list[Plan], int]:
    """Play the plans one request after the other, with readers counted as an engine counts them. stored: prefixes whose
    snapshots are there all the time. Return the plans, and the most snapshots that were live at once."""
    live: dict[Prompt, int] = {}
    plans: list[Plan] = []
    unread: set[Prompt] = set()
    most = written = read = 0
    for window in windows:
        handed_over = plans[-1].handed_on if plans else []
        prompts = [data.prompts[number] for number in window.items]
        there = [
            (node_at(window.tree, index, len(prefix)), len(prefix))
            for prefix in stored
            for index in [index for index, prompt in enumerate(prompts) if prompt[: len(prefix)] == prefix][:1]
        ]
        plan = planner.plan(window.tree, there, window.num_requests, handed_over)
        plans.append(plan)
        for one, count in zip(handed_over, plan.new_readers, strict=True):
            prefix = data.prompts[window.items[one.request]][: one.position]
            live[prefix] += count
            if not live[prefix]:
                del live[prefix]
        peak = len(live)
        for index in plan.order:
            prompt, todo = data.prompts[window.items[index]], plan.requests[index]
            source = prompt[: todo.resume_at]
            assert not source or source in stored or live[source] > 0, (data.where, index)
            for position, reads in zip(todo.keep, todo.reads, strict=True):
                assert position > todo.resume_at and reads > 0, (data.where, index)
                if prompt[:position] not in live:
                    unread.add(prompt[:position])
                    written += 1
                live[prompt[:position]] = live.get(prompt[:position], 0) + reads
            peak = max(peak, len(live))
            if source and source not in stored:
                read += source in unread
                unread.discard(source)
                live[source] -= 1
                if not live[source]:
                    del live[source]
        assert peak <= plan.peak_live_snapshots, data.where
        most = max(most, peak)
    assert not live, (data.where, "each snapshot is released by its last reader")
    if planner.capacity_bytes is None:
        assert sum(plan.snapshots_written for plan in plans) == written == read, data.where
        assert sum(plan.snapshots_read for plan in plans) == read, data.where
    return plans, most


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("footprint", [STATE_ONLY, HYBRID])
def test_what_is_handed_on_is_there_and_is_released(order: str, footprint: Footprint) -> None:
    """Catches a snapshot that is read after its last reader, or held for ever; and with all later requests known and
    room for everything, one token that is computed again because a window ended. Without room: a plan that looks for
    this window's requests where only later ones pass a stored snapshot."""
    for _ in range(tries(40)):
        data = random_dataset(random.randrange(10**6))
        windows, block_size = random_windows(data), random.choice([1, 2, 3, 5])
        plans, _ = run(data, windows, Planner(block_size, order, footprint))
        if len(windows[0].items) == len(data.prompts):
            work = [window.items[index] for window, plan in zip(windows, plans, strict=True) for index in plan.order]
            expected = serve(data, work, 1, "all").resume_at
            resumed = {
                window.items[index]: plan.requests[index].resume_at
                for window, plan in zip(windows, plans, strict=True)
                for index in plan.order
            }
            assert resumed == expected, data.where
        for snapshots in random.sample(range(1, 13), 3):
            room, stored = snapshots * footprint.pool_bytes(20), random_held(data, block_size)
            for plan in run(data, windows, Planner(block_size, order, footprint, room), stored)[0]:
                assert plan.peak_live_bytes <= room, data.where
