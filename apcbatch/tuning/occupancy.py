"""Estimate what the requests of an input hold at their peak: states, snapshots and KV, for `plan`.

The plan counts live snapshots as if requests ran one by one. Here they run at once: a pass admits requests in the
plan's order, each as soon as its snapshot is there, while slots are free and the pass has room for prompt tokens. So
requests overtake those that wait for a snapshot, and more snapshots are live. A slot is held until the answer ends.

Pages are counted once: a request fills those after the snapshot that it resumed from, and holds the ones before it,
which another request filled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from apcbatch.config import Config
from apcbatch.cores import find_memory, may_have_gpu
from apcbatch.engine.memory import MemoryPlan, Use
from apcbatch.engine.serving import LOOK_AHEAD
from apcbatch.job.tool_workers import most_open
from apcbatch.layout import PAGE_TOKENS
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Plan
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.windows import REQUEST_TOKENS
from apcbatch.tuning.forecast import Forecast, PolicyForecast, Served
from apcbatch.types import Policy


@dataclass(frozen=True)
class Job:
    """One request. length, answer: tokens of its prompt and of its answer. resume_at: position that it resumes from.
    leader: index of the request that keeps that snapshot; None if it was kept before. keeps: position -> number of
    later requests that resume from it; 0 for a snapshot that stays."""

    length: int
    answer: int
    resume_at: int = 0
    leader: int | None = None
    keeps: dict[int, int] = field(default_factory=dict)


@dataclass
class Peak:
    """The most requests, snapshots and KV pages at once, each at its own time, and the largest pass in tokens."""

    requests: int = 0
    snapshots: int = 0
    pages: int = 0
    pass_tokens: int = 0


def peak_of(jobs: Sequence[Job], order: Sequence[int], max_running: int, max_batch_tokens: int, held: int) -> Peak:
    """Simulate the passes of a window. order: indices of the jobs. held: snapshots that are live all the time."""
    peak, snapshots, pages = Peak(snapshots=held), held, 0
    rank = {index: number for number, index in enumerate(order)}
    followers: dict[int, list[int]] = {}
    for index in order:
        leader = jobs[index].leader
        if leader is not None:
            followers.setdefault(leader, []).append(index)
    ready = [rank[index] for index in order if jobs[index].leader is None]  # ascending, so a heap
    left = {index: dict(jobs[index].keeps) for index in order}  # readers to come, by position
    holders = dict.fromkeys(order, 0)  # of a request's pages: itself, its snapshots, requests that resumed from them
    ends: list[tuple[int, int]] = []  # (pass, index)
    prompts: deque[tuple[int, int]] = deque()  # (index, tokens to compute)
    num_admitted = num_pass = waiting_tokens = 0

    def release(index: int | None) -> int:
        freed = 0
        while index is not None:
            holders[index] -= 1
            if holders[index]:
                break
            freed += _pages(jobs[index])
            index = jobs[index].leader
        return freed

    while ready or prompts or ends:
        while ends and ends[0][0] <= num_pass:
            pages -= release(heappop(ends)[1])
        while ready and ready[0] < num_admitted + LOOK_AHEAD * max_running:
            if len(prompts) + len(ends) >= max_running or waiting_tokens >= max_batch_tokens:
                break
            index = order[heappop(ready)]
            job = jobs[index]
            num_admitted += 1
            holders[index] += 1
            pages += _pages(job)
            if job.leader is not None:
                holders[job.leader] += 1
            prompts.append((index, job.length - job.resume_at))
            waiting_tokens += job.length - job.resume_at
        peak.requests = max(peak.requests, len(prompts) + len(ends))
        budget, begun = max_batch_tokens, list[Job]()
        while prompts and budget:
            index, tokens = prompts.popleft()
            if tokens == jobs[index].length - jobs[index].resume_at:
                begun.append(jobs[index])
            count = min(tokens, budget)
            budget -= count
            if count < tokens:
                prompts.appendleft((index, tokens - count))
                continue
            heappush(ends, (num_pass + max(1, jobs[index].answer), index))
            snapshots += len(jobs[index].keeps)
            holders[index] += len(jobs[index].keeps)
            for follower in followers.get(index, ()):
                heappush(ready, rank[follower])
        waiting_tokens -= max_batch_tokens - budget
        peak.pass_tokens = max(peak.pass_tokens, max_batch_tokens - budget)
        peak.snapshots, peak.pages = max(peak.snapshots, snapshots), max(peak.pages, pages)
        for job in begun:  # a snapshot is held until the first pass of its last reader
            if job.leader is not None:
                left[job.leader][job.resume_at] -= 1
                if not left[job.leader][job.resume_at]:
                    snapshots -= 1
                    pages -= release(job.leader)
        is_full = not prompts and len(ends) >= max_running
        num_pass = ends[0][0] if ends and (is_full or not (prompts or ready)) else num_pass + 1
    return peak


@dataclass(frozen=True)
class MemoryForecast:
    """Memory of a run of an input. plan: of the host, or of the devices. use: of the input. limit_bytes: memory that
    the run may take."""

    plan: MemoryPlan
    use: Use
    limit_bytes: int

    @property
    def sentence(self) -> str:
        return self.plan.needs(self.limit_bytes, self.use)

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast as a JSON object."""
        about, at_most = self.plan.used(self.use), self.plan.most(self.use)
        return {
            "on": "host" if self.plan.on_host else "device",
            "about_bytes": sum(about.values()),
            "about": about,
            "at_most_bytes": sum(at_most.values()),
            "at_most": at_most,
            "limit_bytes": self.limit_bytes,
        }


def memory_limit(config: Config) -> int:
    """Return the bytes of memory that a run may take, of the host or of --gpus devices. Raises UsageError for a device
    that is not there."""
    if config.gpus == 1 and (config.device == "cpu" or (config.device == "auto" and not may_have_gpu())):
        return find_memory()
    from apcbatch.model.devices import choose_devices, memory_of

    return memory_of(choose_devices(config.device, config.gpus))[0]


class Occupancy:
    """Peak of what the requests of an input hold at once under a policy, at the block size of the configuration. A
    Forecaster adds them. answer_tokens: returns the tokens of an answer, estimated from what was read so far."""

    def __init__(self, config: Config, policy: Policy, answer_tokens: Callable[[], int]) -> None:
        self._config, self._policy, self._answer_tokens = config, policy, answer_tokens
        self._ahead: deque[Job] = deque()  # of a policy without a plan: requests of windows to come
        self._peak, self._window_tokens = Peak(), 0

    def add(self, policy: Policy, block_size: int, served: Served) -> None:
        """Add a request: see Forecaster.watch."""
        if policy == self._policy != "planned" and block_size == self._config.block_size:
            self._ahead.append(Job(served.length, self._answer_tokens(), served.resume_at))

    def add_window(self, tree: PrefixTree, plan: Plan) -> None:
        """Add the next window, with its plan."""
        number, answer, held = len(plan.requests), self._answer_tokens(), 0
        order: Sequence[int] = range(number)
        if self._policy != "planned":
            jobs = [self._ahead.popleft() for _ in order]
        else:
            order, held, jobs = plan.order, len(plan.handed_on), []
            lengths = (tree.end[node] for node in tree.end_node)  # of the requests ahead too
            for length, one, leader in zip(lengths, plan.requests, plan.leaders, strict=False):
                keeps = dict.fromkeys(() if self._config.store is None else one.keep_for_later, 0)
                keeps |= zip(one.keep, one.reads, strict=True)
                jobs.append(Job(length, answer, one.resume_at, leader, keeps))
        here = peak_of(jobs, order, self._config.max_running, self._config.max_batch_tokens, held)
        self._peak = Peak(*(max(getattr(self._peak, name), value) for name, value in vars(here).items()))
        self._window_tokens = max(self._window_tokens, tree.unique_tokens + REQUEST_TOKENS * tree.num_requests)

    def use(self, forecast: Forecast, footprint: Footprint) -> Use:
        """Return what a run uses at its peak, after the last request."""
        peak, own = self._peak, forecast.grids[self._config.block_size][self._policy]
        snapshot_bytes, kv_bytes = peak.snapshots * footprint.state_bytes, peak.pages * footprint.page_bytes
        if self._policy != "planned":
            snapshot_bytes, kv_bytes = _kept(own, footprint, self._config.pool_size, kv_bytes)
        is_live, wanted = self._config.turns == "live", forecast.requests * self._config.samples
        episodes = min(wanted, most_open(self._config)) if is_live else 0
        if episodes:
            tokens = forecast.prompt_tokens // max(1, forecast.requests) + self._answer_tokens()
            snapshot_bytes = 2 * episodes * footprint.state_bytes
            kv_bytes = episodes * -(-tokens // PAGE_TOKENS) * footprint.page_bytes
        return Use(
            requests=peak.requests,
            snapshot_bytes=snapshot_bytes,
            kv_bytes=kv_bytes,
            pass_tokens=peak.pass_tokens,
            window_tokens=self._window_tokens,
            input_tokens=forecast.unique_tokens + self._answer_tokens() * forecast.requests,
            episodes=episodes,
        )


def _kept(forecast: PolicyForecast, footprint: Footprint, pool_bytes: int, kv_bytes: int) -> tuple[int, int]:
    """Return the bytes of the states and of the KV of a policy that keeps all its snapshots, as far as the pool has
    room. kv_bytes: of running requests."""
    states = forecast.peak_live_snapshots * footprint.state_bytes
    share = min(1.0, pool_bytes / max(1, forecast.peak_live_bytes))
    return round(share * states), round(share * (forecast.peak_live_bytes - states)) + kv_bytes


def _pages(job: Job) -> int:
    """Return the pages that a request fills."""
    return -(-(job.length + job.answer) // PAGE_TOKENS) - job.resume_at // PAGE_TOKENS
