"""Predict the reuse of a run for each block size, and the seconds that it takes on this machine.

Invariant: the forecast equals what `run` reports with the same options on an empty store, request by request, if all
kept snapshots fit. The seconds are an estimate: requests are batched into passes in the scheduler's order, and a
request that resumes waits until the previous one of its conversation has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from apcbatch.config import Config
from apcbatch.engine.serving import LOOK_AHEAD
from apcbatch.job.planning import planner_for
from apcbatch.plan.forecast import Forecast, forecast
from apcbatch.plan.planner import Planner
from apcbatch.plan.tree_shape import TreeShape
from apcbatch.tuning.choice import Candidate
from apcbatch.tuning.measurement import Measurement
from apcbatch.tuning.survey import Survey


def predict(config: Config, surveyed: Survey, forecast: Forecast, measured: Measurement) -> list[Candidate]:
    """Return one candidate for each block size of a forecast, in its order."""
    shape = TreeShape(surveyed.tree)
    order = forecast.order if config.policy == "planned" else range(shape.num_requests)
    candidates = []
    for block_size, grid in forecast.grids.items():
        table = grid[config.policy]
        work = count_work(
            order,
            shape.length,
            table.resume_at,
            shape.conversation,
            config.max_batch_tokens,
            config.max_running,
        )
        kept = table.snapshots_written + table.snapshots_for_later
        restores = sum(position > 0 for position in table.resume_at)
        on_disk = config.store is not None and table.peak_live_bytes > config.pool_size
        restore_s = measured.restore_disk_s if on_disk else measured.restore_ram_s
        written = min(table.store_bytes, config.store_size) if config.store is not None else 0
        candidates.append(
            Candidate(
                block_size,
                table,
                work.prefill_s(measured, kept),
                restores * restore_s,
                written * measured.write_byte_s,
            )
        )
    return candidates


def forecast_policies(config: Config, surveyed: Survey, block_sizes: Iterable[int]) -> Forecast:
    """Forecast all policies, for `plan`, in the order of --order. --store-size bounds the snapshots for later runs even
    without a --store."""
    planned = replace(config, policy="planned")
    planner = planner_for(planned, surveyed.footprint, later_budget_bytes=config.store_size)
    return _forecast(surveyed, block_sizes, planner)


def forecast_run(config: Config, surveyed: Survey, block_sizes: Iterable[int]) -> Forecast:
    """Forecast for `tune-block-size`, with the order and the limits of a `run` with this configuration."""
    planner = planner_for(config, surveyed.footprint)
    return _forecast(surveyed, block_sizes, planner)


def _forecast(surveyed: Survey, block_sizes: Iterable[int], planner: Planner) -> Forecast:
    thoughts = surveyed.without_thoughts
    return forecast(surveyed.tree, block_sizes, planner, surveyed.num_unstable, thoughts, surveyed.windows)


@dataclass(frozen=True)
class Workload:
    """Sums of the work of a run. chunks: parts of requests in passes. tokens: computed tokens. context_pairs: for each
    computed token, the number of tokens before it."""

    passes: int
    chunks: int
    tokens: int
    context_pairs: float

    def prefill_s(self, measured: Measurement, snapshots: int) -> float:
        """Return the predicted seconds of prefill, with the cost of keeping the snapshots."""
        return (
            self.passes * measured.pass_s
            + self.chunks * measured.chunk_s
            + self.tokens * measured.token_s
            + self.context_pairs * measured.context_s
            + snapshots * measured.snapshot_s
        )


def count_work(
    order: Sequence[int],
    lengths: Sequence[int],
    resume_at: Sequence[int],
    conversations: Sequence[int],
    max_batch_tokens: int,
    max_running: int,
) -> Workload:
    """Count the work of a run in which each request generates one token. order: request indices in the order of the
    run; the other sequences are indexed by request."""
    leaders = _leaders(order, resume_at, conversations)
    computed = [length - cached for length, cached in zip(lengths, resume_at, strict=True)]
    left = list(computed)
    coming, waiting = deque(order), list[int]()
    running = list[int]()
    passes = chunks = 0
    while coming or waiting or running:
        while coming and len(waiting) < LOOK_AHEAD * max_running:
            waiting.append(coming.popleft())
        passed_over = list[int]()
        for index in waiting:
            free = len(running) < max_running and (leaders[index] == index or not left[leaders[index]])
            (running if free else passed_over).append(index)
        waiting, budget = passed_over, max_batch_tokens
        for index in running:
            count = min(budget, left[index])
            budget -= count
            left[index] -= count
            chunks += count > 0
        running = [index for index in running if left[index]]
        passes += 1
    pairs = sum(count * (length - count / 2) for length, count in zip(lengths, computed, strict=True))
    return Workload(passes, chunks, sum(computed), pairs)


def _leaders(order: Sequence[int], resume_at: Sequence[int], conversations: Sequence[int]) -> list[int]:
    """Return, for each request, the index of the request that it waits for, or its own index."""
    leaders, before = list(range(len(order))), dict[int, int]()
    for index in order:
        if resume_at[index]:
            leaders[index] = before.get(conversations[index], index)
        before[conversations[index]] = index
    return leaders
