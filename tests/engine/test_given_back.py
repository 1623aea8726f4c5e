"""What requests hold while they run is given back when they end, however they end: pins, slots, pages, promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apcbatch import Engine, Request
from apcbatch.engine.pool import SnapshotPool
from apcbatch.plan.planner import Planner
from tests.engine.opened import OpenedEngine
from tests.engine.runs import by_id, tokens
from tests.engine.test_tight_pool import requests_of
from tests.plan.plan_oracle import dataset, make_plan

ROOMY = 16 << 20


def free_slots(pool: SnapshotPool) -> list[int]:
    """The slots that snapshots can have beside those that are held: they are all reserved for a moment."""
    held, capacity_bytes = list(pool), pool.capacity_bytes
    for snapshot in held:
        snapshot.pins += 1
    pool.capacity_bytes, slots = 1 << 62, []
    while (slot := pool.reserve(b"", awaited=False)) is not None:
        slots.append(slot)
    for slot in reversed(slots):  # so that they are handed out in the same order again
        pool.cancel(b"", slot)
    pool.capacity_bytes = capacity_bytes
    for snapshot in held:
        snapshot.pins -= 1
    return sorted(slots)


class Books:
    """What an engine had before its first request, to compare with what it has when nothing runs."""

    def __init__(self, engine: OpenedEngine) -> None:
        self.engine, parts = engine, engine.parts
        self.pool, self.pages, self.scheduler, self.drafting = parts.pool, parts.pages, parts.scheduler, parts.drafting
        self.slots, self.lanes = free_slots(self.pool), self._free_lanes()
        self.num_drafted = len(self.drafting.free_slots)

    def _free_lanes(self) -> list[int]:
        return sorted([*self.scheduler.places.free_slots, *self.drafting.free_slots])  # accepted drafts exchange them

    def balance(self) -> None:
        """All that is not free is a snapshot's, no snapshot is pinned, no request waits or is awaited."""
        self.engine.flush()
        held = list(self.pool)
        assert [snapshot.pins for snapshot in held] == [0] * len(held)
        assert self.pool.num_reserved == 0
        assert sorted(free_slots(self.pool) + [snapshot.slot for snapshot in held]) == self.slots
        holders = [page for snapshot in held for page in snapshot.pages.tolist()]
        assert self.pages.refs.tolist() == [holders.count(page) for page in range(self.pages.num_pages)]
        assert self.pages.num_free == self.pages.num_pages - len(set(holders))
        assert (len(self.scheduler._pending), self.scheduler.places.preempted) == (0, [])
        assert self._free_lanes() == self.lanes and len(self.drafting.free_slots) == self.num_drafted
        assert self.engine.num_unfinished == 0


@pytest.fixture(params=["mamba", "jamba", "jamba, a pass ahead", "mamba, two stages", "jamba, three stages"])
def open_books(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path], open_engine: Callable[..., Engine],
    stages: Callable[[int], None],
) -> Callable[..., Books]:  # fmt: skip
    """make(**options) -> the books of an engine of a one-state or a hybrid model; of one that begins passes ahead, as
    on a device, or has several under way, as on several devices."""
    family, _, ahead = request.param.partition(", ")
    if "stages" in ahead:
        stages({"two stages": 2, "three stages": 3}[ahead])

    def make(**options: Any) -> Books:
        return Books(open_engine(tiny_checkpoint(family), runs_ahead=bool(ahead), **options))

    return make


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("policy", "max_running"), [("all", 1), ("last", 4), ("planned", 4), ("none", 1)])
def test_after_a_run(policy: str, max_running: int, open_books: Callable[..., Books], tmp_path: Path) -> None:
    """Catches a pin, a slot or a page that is lost with each request, with room for a few snapshots and a store."""
    books = open_books(policy=policy, max_running=max_running, store=tmp_path, pool_size_bytes=1 << 20)
    prefix = tokens(70, 1)
    first = prefix + tokens(30, 2)
    prompts = [first, prefix + tokens(50, 3), prefix, first + tokens(40, 4), tokens(90, 5), prefix]
    requests = [Request(str(n), one, max_tokens=20, ignore_eos=True, logprobs=True) for n, one in enumerate(prompts)]
    assert all(result.error is None for result in books.engine.run(requests))
    books.balance()


@pytest.mark.drawn(6)
@pytest.mark.parametrize("damaged", [False, True])
def test_after_a_look_for_longer_ones_on_disk(damaged: bool, open_books: Callable[..., Books], tmp_path: Path) -> None:
    """Fault: the snapshot in memory that is kept safe while a longer one is read from disk stayed pinned for good,
    whether the longer one could be read or not."""
    prompt = tokens(100, 6)
    first = open_books(store=tmp_path)
    cold = list(first.engine.run([Request("cold", prompt, max_tokens=4, ignore_eos=True)]))
    first.engine.close()
    books = open_books(store=tmp_path)
    list(books.engine.run([Request("short", prompt[:40], max_tokens=1)]))
    if damaged:
        for file in tmp_path.glob("objects/**/*.safetensors"):
            file.write_bytes(file.read_bytes()[:-1])
    (warm,) = books.engine.run([Request("long", prompt, max_tokens=4, ignore_eos=True)])
    assert (warm.cached_tokens, warm.cached_from) == ((32, "memory") if damaged else (96, "disk"))
    assert warm.token_ids == cold[0].token_ids
    books.balance()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_after_planned_requests_were_given_up(steps: int, open_books: Callable[..., Books]) -> None:
    """Catches snapshots that are held for requests which will never come."""
    prefix = [1 + k % 50 for k in range(40)]
    data = dataset(*([*prefix, 60 + k, *prefix[:20]] for k in range(4)), prefix[:20])
    plan = make_plan(data, Planner(4, "file"))
    books = open_books(block_size=4, policy="planned", max_running=2, max_batch_tokens=30)
    for request in requests_of(data, plan):
        books.engine.submit(request)
    for _ in range(steps):
        books.engine.step()
    books.engine.abort()
    books.balance()
    assert not len(books.pool)


def test_what_can_never_run_keeps_nobody_waiting(tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a planned request whose KV does not fit in the pool and whose followers then wait for its snapshots for
    ever: they compute their own prefix."""
    prefix = [1 + k % 50 for k in range(40)]
    data = dataset([*prefix, 60], [*prefix, 61, 62], [*prefix, 63, 64, 65])
    plan = make_plan(data, Planner(8, "file"))
    probe = Engine(tiny_checkpoint("jamba"), policy="none", pool_size_bytes=ROOMY)
    page_bytes, state_bytes = probe.footprint.page_bytes, probe.footprint.state_bytes
    probe.close()
    engine = OpenedEngine(
        tiny_checkpoint("jamba"), block_size=8, policy="planned", max_running=2,
        pool_size_bytes=4 * page_bytes + 2 * state_bytes,
    )  # fmt: skip
    books = Books(engine)
    requests = requests_of(data, plan)
    requests[0].max_tokens = 64 * (books.pages.num_pages + 1)
    results = by_id(list(engine.run(requests)))
    assert results["0"].error is not None and results["0"].error.code == "out_of_memory"
    tokens, pages = 41 + requests[0].max_tokens, books.pages.num_pages + 2
    assert f"the KV of {tokens} tokens, the prompt and its answer ({pages} pages)" in str(results["0"].error)
    assert [results[name].error for name in "12"] == [None, None]
    assert sum(results[name].computed_tokens for name in "12") <= 42 + 43
    books.balance()
    engine.close()
