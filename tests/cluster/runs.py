"""Runs of the real planner and the real driver over simulated workers, with every invariant checked on the way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from apcbatch.cluster import driver
from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.runtime import ClusterSettings, Hooks, Runtime
from apcbatch.cluster.scheduler import GroupScheduler, SubmitBuffer, UnplannedQueue
from apcbatch.cluster.states import StateTable
from apcbatch.cluster.tasks import Item
from apcbatch.cluster.workers import WorkerTable
from apcbatch.engine.serving import serve
from apcbatch.plan.planner import Plan, Planner
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.types import Request, Result
from tests.cluster.simulated_work import answer_of
from tests.cluster.simulator import SimRuntime, Speeds, Trouble
from tests.plan.plan_oracle import Dataset

SPEEDS = Speeds()
CALM = Trouble()
TO_ITSELF = Hooks(to_wire=lambda request: request)


def repeated(data: Dataset, times: int) -> Dataset:
    """A dataset so many times over, each time with tokens of its own."""
    step = 1 + max(int(np.max(prompt)) for prompt in data.prompts)
    prompts = [np.asarray(prompt, np.int32) for prompt in data.prompts]
    return Dataset(
        [prompt + np.int32(step * turn) for turn in range(times) for prompt in prompts],
        [len(data.prompts) * turn + number for turn in range(times) for number in data.conversations],
        data.where,
    )


def first(data: Dataset, num_conversations: int) -> Dataset:
    """The first conversations of a dataset."""
    kept = [index for index, number in enumerate(data.conversations) if number < num_conversations]
    return Dataset([data.prompts[i] for i in kept], [data.conversations[i] for i in kept], data.where)


@dataclass
class Planned:
    """requests: in the plan's order."""

    requests: list[Request]
    plan: Plan

    @property
    def computed_tokens(self) -> int:
        return self.plan.computed_tokens


def planned(data: Dataset, block_size: int = 64, max_tokens: int = 32, skip: frozenset[int] = frozenset()) -> Planned:
    """The requests of a dataset with their plans; without those whose index is in `skip`."""
    tree, indexes = PrefixTree(), []
    for index, (tokens, conversation) in enumerate(zip(data.prompts, data.conversations, strict=True)):
        if index not in skip:
            tree.add(np.asarray(tokens, np.int32), conversation)
            indexes.append(index)
    plan = Planner(block_size).plan(tree)
    requests = [
        Request(str(indexes[i]), data.prompts[indexes[i]], max_tokens, plan=plan.requests[i], tag=("tag", indexes[i]))
        for i in plan.order
    ]
    return Planned(requests, plan)


def lower_bound(requests: Sequence[Request], speeds: Speeds, num_workers: int) -> tuple[float, float]:
    """(total / n, the longest path) in seconds: no schedule can be shorter."""
    made: dict[tuple[int, int], float] = {}  # when a snapshot can be there at the earliest
    prefill, decode = speeds.prefill_tokens_per_s, speeds.decode_tokens_per_s
    total = longest = 0.0
    for request in requests:
        tokens, plan = np.asarray(request.token_ids, np.int32), request.plan
        keys = {position: hash(tokens[:position].tobytes()) for position in {plan.resume_at, *plan.keep}}
        begin = made[plan.resume_at, keys[plan.resume_at]] if plan.resume_at else 0.0
        for position in plan.keep:
            made[position, keys[position]] = begin + (position - plan.resume_at) / prefill
        own = (len(tokens) - plan.resume_at) / prefill + len(answer_of(request)) / decode
        total, longest = total + own, max(longest, begin + own)
    return total / num_workers, longest


class Submitted(SubmitBuffer):
    """items: all that were ever added."""

    def __init__(self, fingerprint: bytes) -> None:
        super().__init__(fingerprint)
        self.items: list[Item] = []

    def add(self, request: Request) -> Item:
        self.items.append(super().add(request))
        return self.items[-1]


class SeenEngine(ClusterEngine):
    """A driver with its parts, which are seen where they are made."""

    submitted: Submitted
    unplanned: UnplannedQueue
    scheduler: GroupScheduler
    workers: WorkerTable
    states: StateTable

    def __init__(self, runtime: Runtime, settings: ClusterSettings, hooks: Hooks = TO_ITSELF) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, of, part in (
                ("submitted", "SubmitBuffer", Submitted), ("unplanned", "UnplannedQueue", UnplannedQueue),
                ("scheduler", "GroupScheduler", GroupScheduler), ("workers", "WorkerTable", WorkerTable),
                ("states", "StateTable", StateTable),
            ):  # fmt: skip
                patch.setattr(driver, of, partial(self._make, name, part))
            super().__init__(runtime, settings, hooks)

    def _make(self, name: str, part: Callable[..., Any], *arguments: Any) -> Any:
        made = part(*arguments)
        setattr(self, name, made)
        return made

    @property
    def unanswered(self) -> list[Item]:
        """The items of submitted requests that are neither done nor dropped."""
        items = self.submitted.items = [item for item in self.submitted.items if not item.is_done]
        return items


@dataclass
class Outcome:
    results: list[Result]
    runtime: SimRuntime
    engine: SeenEngine
    own_s: float  # that the driver itself took

    @property
    def by_id(self) -> dict[str, Result]:
        return {result.id: result for result in self.results}


def num_lost(engine: ClusterEngine) -> int:
    """Workers that ended on their own."""
    return sum(one["ending"] == "lost" for one in engine.counters.workers)


def num_sent(engine: ClusterEngine) -> int:
    """States that a worker received from another node."""
    return sum(one["states_received"] for one in engine.counters.workers)


def audit(engine: SeenEngine, most_bytes: int = SPEEDS.node_bytes) -> None:
    """Every unanswered request is in exactly one place; what is held is within the bounds of each node."""
    places = [*engine.submitted.buffered, *engine.unplanned]
    for group in engine.scheduler:
        places += group.items
    for worker in engine.workers:
        alone = any(assignment.group.is_alone for assignment in worker.assignments)
        assert not alone or len(worker.assignments) == 1, "a suspect has something beside it"
        for assignment in worker.assignments:
            places += [item for item in assignment.items.values() if not item.is_done]
    numbers = [item.number for item in places]
    assert len(numbers) == len(set(numbers)), "a request is in two places"
    assert not any(item.is_done for item in places), "a request that has its result is to be computed again"
    lost = {item.number for item in engine.unanswered}.difference(numbers)
    assert not lost and len(numbers) <= engine.num_unfinished, f"{len(lost)} requests are lost"
    assert len(engine.states) == len(list(engine.states))
    by_home = Counter[str]()
    for state in engine.states:
        assert state.is_wanted, "a state is held for nobody"
        assert state.home in state.nodes
        by_home[state.home] += state.num_bytes
    assert all(num_bytes <= most_bytes for num_bytes in by_home.values()), "a node has more than it has room for"


def run(
    requests: Sequence[Request] | Callable[[SeenEngine], Iterator[Request]],
    num_workers: int = 4,
    speeds: Speeds = SPEEDS,
    trouble: Trouble = CALM,
    *,
    per_node: int = 1,
    audited: bool = True,
    stop_after: int | None = None,
    hooks: Hooks = TO_ITSELF,
    **settings: object,
) -> Outcome:
    """Answer requests, or those that a function of the engine yields. stop_after: the driver dies when it has so many
    results."""
    runtime = SimRuntime(speeds, trouble, per_node)
    engine = SeenEngine(runtime, ClusterSettings(num_workers, **settings), hooks)
    if audited:
        runtime.check = lambda: audit(engine, speeds.node_bytes)
    results: list[Result] = []
    source: Iterator[Request] = iter(requests(engine) if callable(requests) else requests)
    begin = time.thread_time() - runtime.spent_s
    for some in serve(engine, lambda: next(source, None)):
        results += some
        if stop_after is not None and len(results) >= stop_after:
            break
    return Outcome(results, runtime, engine, time.thread_time() - begin - runtime.spent_s)


def check_answers(outcome: Outcome, requests: Sequence[Request]) -> None:
    """Every request has one result, which is its own; an error only if two workers ended while they had it."""
    ids = [result.id for result in outcome.results]
    assert sorted(ids) == sorted(request.id for request in requests), "results are lost or doubled"
    by_id = {request.id: request for request in requests}
    for result in outcome.results:
        assert result.tag == by_id[result.id].tag
        if result.error is not None:
            assert result.error.code == "worker_lost" and outcome.runtime.deaths[result.id] >= 2, result.error
        else:
            assert result.token_ids == answer_of(by_id[result.id])


def check_plan(outcome: Outcome, requests: Sequence[Request], least_sent_tokens: int = 16) -> int:
    """Every request resumed where the plan says, or fewer than `least_sent_tokens` before. Return the tokens that are
    computed again for this."""
    by_id, again = outcome.by_id, 0
    for request in requests:
        assert request.plan is not None
        behind = request.plan.resume_at - by_id[request.id].cached_tokens
        assert 0 <= behind < least_sent_tokens
        assert by_id[request.id].ideal_cached_tokens == request.plan.ideal
        again += behind
    return again
