"""Policy `planned` in a pool with not a byte more than the plan needs one request after the other, and in far less."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from apcbatch import Engine, Request, Result
from apcbatch.errors import UsageError
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Plan, Planner
from apcbatch.plan.tree_shape import ORDERS
from tests.effort import tries
from tests.engine.opened import OpenedEngine
from tests.engine.runs import told
from tests.plan.plan_oracle import Dataset, dataset, make_plan, random_dataset, within_vocabulary
from tests.tiny import VOCAB

PLENTY = 64 << 20
RUNNING = (1, 2, 6, 32)
# By block size: how often each token is repeated, so that prompts have several blocks.
STRETCH = {1: 1, 64: 17}


def draw(block_size: int, seed: int) -> Dataset:
    """Prompts of the tiny models' vocabulary, some blocks long."""
    return within_vocabulary(random_dataset(seed), VOCAB, STRETCH[block_size])


def open_engine(folder: Path, **options: object) -> OpenedEngine:
    return OpenedEngine(folder, **{"policy": "planned", "max_batch_tokens": 96, **options})


def footprint_of(folder: Path) -> Footprint:
    """What a state and a page of this model take."""
    probe = open_engine(folder, pool_size_bytes=PLENTY)
    footprint = probe.footprint
    probe.close()
    return footprint


def pool_for(data: Dataset, num_bytes: int, page_bytes: int) -> int:
    """That number of bytes, or what the longest prompt's own KV needs to run at all."""
    return max(num_bytes, page_bytes * (2 + max(map(len, data.prompts)) // 64))


def requests_of(data: Dataset, plan: Plan) -> list[Request]:
    """The requests in the plan's order."""
    return [
        Request(
            str(index), list(data.prompts[index]), max_tokens=2, keep_answer=False, ignore_eos=True, logprobs=True,
            plan=plan.requests[index],
        )
        for index in plan.order
    ]  # fmt: skip


def serve(engine: Engine, data: Dataset, plan: Plan) -> list[Result]:
    """The results in the order of the input; the engine is closed."""
    results = sorted(engine.run(requests_of(data, plan)), key=lambda result: int(result.id))
    engine.close()
    return results


def answers(results: list[Result]) -> list[object]:
    assert all(result.error is None for result in results)
    return [told(result) for result in results]


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 64])
def test_the_plans_own_peak_is_enough(folder: Path, block_size: int) -> None:
    """Catches requests that run side by side pushing out what another one still waits for, and a stall."""
    footprint = footprint_of(folder)
    for seed in random.sample(range(10**6), tries(20)):
        data, order = draw(block_size, seed), random.choice(ORDERS)
        free = make_plan(data, Planner(block_size, order, footprint))
        expected = answers(serve(open_engine(folder, policy="none", pool_size_bytes=PLENTY), data, free))
        for share in (1.0, 0.5):
            plan = make_plan(data, Planner(block_size, order, footprint, int(share * free.peak_live_bytes)))
            for max_running in RUNNING if share == 1.0 else (1, 6):
                where = (data.where, block_size, order, share, max_running)
                capacity = pool_for(data, plan.peak_live_bytes, footprint.page_bytes)
                engine = open_engine(folder, block_size=block_size, max_running=max_running, pool_size_bytes=capacity)
                results = serve(engine, data, plan)
                assert answers(results) == expected, where
                assert [one.cached_tokens for one in results] == [todo.resume_at for todo in plan.requests], where
                counters = engine.counters
                assert counters.snapshots_written == counters.snapshots_read <= plan.snapshots_written, where
                assert counters.snapshots_evicted == 0, where
                assert (counters.peak_live_snapshots > 0) == (plan.peak_live_snapshots > 0), where
                assert counters.peak_live_snapshots * footprint.state_bytes <= capacity, where
                if max_running == 1:
                    assert counters.peak_live_snapshots <= plan.peak_live_snapshots, where


@pytest.mark.drawn(2)
@pytest.mark.slow
def test_far_too_little_memory_changes_no_answer(folder: Path) -> None:
    """Catches a stall, an error or a pool beyond its size where the plan was made for more memory than there is."""
    footprint = footprint_of(folder)
    for seed in random.sample(range(10**6), tries(20)):
        data = draw(1, seed)
        plan = make_plan(data, Planner(1, random.choice(ORDERS), footprint))
        expected = answers(serve(open_engine(folder, policy="none", pool_size_bytes=PLENTY), data, plan))
        for max_running in RUNNING:
            for num_bytes in (0, plan.peak_live_bytes // 4):
                capacity = pool_for(data, num_bytes, footprint.page_bytes)
                engine = open_engine(folder, block_size=1, max_running=max_running, pool_size_bytes=capacity)
                for request in requests_of(data, plan):
                    engine.submit(request)
                results = []
                while engine.num_unfinished:
                    results += engine.step()
                    assert engine.parts.pool.held_bytes <= capacity, (data.where, max_running, num_bytes)
                results.sort(key=lambda result: int(result.id))
                assert answers(results) == expected, (data.where, max_running, num_bytes)
                engine.close()


def test_what_keeps_nothing_runs_beside_what_fills_the_pool(tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches lanes left idle for fear of the pool: who needs no room in it begins at once, who would take the room
    that is spoken for does not."""
    fills = [1 + k % 7 for k in range(8)]
    data = dataset([*fills, 10], [*fills, 11], [20, 20, 20, 1], [20, 20, 20, 2], *([30 + k] * 5 for k in range(4)))
    folder = tiny_checkpoint("mamba")
    footprint = footprint_of(folder)
    plan = make_plan(data, Planner(1, "file", footprint))
    assert (plan.peak_live_snapshots, plan.snapshots_written) == (1, 2)
    engine = open_engine(folder, block_size=1, max_running=8, pool_size_bytes=plan.peak_live_bytes)
    for request in requests_of(data, plan):
        engine.submit(request)
    engine.step()
    assert [sequence.request.id for sequence in engine.parts.scheduler.places.running] == ["0", "4", "5", "6", "7"]
    engine.step()
    assert [sequence.request.id for sequence in engine.parts.scheduler.waiting] == ["2", "3"]
    engine.abort()
    engine.close()


def test_writes_under_way_are_waited_for(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a snapshot that is still to be read being dropped because another one is just being written to disk."""
    prefix = list(range(1, 9))
    data = dataset([*prefix, 20], [*prefix, 21], *([30 + k, *range(40, 50)] for k in range(20)), [*prefix, 22])
    folder = tiny_checkpoint("mamba")
    slot = footprint_of(folder).state_bytes
    plan = make_plan(data, Planner(4, "file", Footprint(slot), later_budget_bytes=None))
    assert plan.peak_live_bytes == slot and plan.for_later[4].snapshots > 10
    engine = open_engine(folder, block_size=4, store=tmp_path, max_running=2, pool_size_bytes=2 * slot)
    results = serve(engine, data, plan)
    assert [results[index].cached_tokens for index in (0, 1, 22)] == [0, 8, 8]
    assert all(results[index].cached_from == "memory" for index in (1, 22))


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
def test_what_future_runs_get_takes_nothing_from_this_one(
    folder: Path, num_stages: int, tmp_path: Path, stages: Callable[[int], None]
) -> None:
    """Catches a snapshot for the store, its slot or its pages, in the place of one that this run waits for."""
    stages(num_stages)
    footprint = footprint_of(folder)
    for seed in random.sample(range(10**6), tries(20)):
        data = draw(1, seed)
        plan = make_plan(data, Planner(1, "short first", footprint, later_budget_bytes=None))
        for max_running in RUNNING:
            engine = open_engine(
                folder, block_size=1, max_running=max_running, store=tmp_path / f"{seed} {max_running}",
                pool_size_bytes=pool_for(data, plan.peak_live_bytes, footprint.page_bytes),
            )  # fmt: skip
            cached = [result.cached_tokens for result in serve(engine, data, plan)]
            assert cached == [todo.resume_at for todo in plan.requests], (data.where, max_running)


def test_a_pool_beyond_the_memory_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: the allocator's own words, or a traceback, where --pool-size is more than the system has."""
    with pytest.raises(UsageError, match=r"may take at most \d+\.\d\d GiB.*; give --pool-size \d+[GM]iB$"):
        open_engine(tiny_checkpoint("jamba"), pool_size_bytes=1 << 50)
