"""Predict the reuse of a run for each block size, and the seconds that it takes on this machine.

Invariant: the forecast equals what `run` reports with the same options on an empty store, request by request, if all
kept snapshots fit. The seconds are an estimate: requests are batched into passes in the scheduler's order, and a
request that resumes waits until the previous one of its conversation has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from apcbatch.config import Config
from apcbatch.engine.serving import LOOK_AHEAD
from apcbatch.job.planning import planner_for
from apcbatch.model.encoded import device_of_codes
from apcbatch.tuning.choice import Candidate
from apcbatch.tuning.forecast import Forecast, Forecaster, MakeForecaster, Served
from apcbatch.tuning.measurement import Measurement
from apcbatch.tuning.occupancy import Occupancy
from apcbatch.types import Policy


def predict(config: Config, forecast: Forecast, passes: Passes, measured: Measurement) -> list[Candidate]:
    """Return one candidate for each block size of a forecast, in its order. passes: those of the forecast's run."""
    candidates = []
    for block_size, grid in forecast.grids.items():
        table, work = grid[config.policy], passes.workload(block_size)
        kept = table.snapshots_written + table.snapshots_for_later
        on_disk = config.store is not None and table.peak_live_bytes > config.pool_size
        restore_s = measured.restore_disk_s if on_disk else measured.restore_ram_s
        written = min(table.store_bytes, config.store_size) if config.store is not None else 0
        seconds = work.prefill_s(measured, kept), work.restores * restore_s, written * measured.write_byte_s
        candidates.append(Candidate(block_size, table, *seconds))
    return candidates


def of_policies(config: Config, block_sizes: Iterable[int], occupancy: Occupancy | None = None) -> MakeForecaster:
    """Return what makes the forecaster of all policies, for `plan`, in the order of --order. --store-size bounds the
    snapshots for later runs even without a --store. occupancy: filled with the requests."""
    planned = replace(config, policy="planned")
    return lambda footprint: Forecaster(
        planner_for(
            planned, footprint, device_of_codes(config.device, config.gpus), later_budget_bytes=config.store_size
        ),
        block_sizes,
        config.window_tokens,
        *(() if occupancy is None else (occupancy.add, occupancy.add_window)),
    )


def of_run(config: Config, block_sizes: Iterable[int], passes: Passes) -> MakeForecaster:
    """Return what makes the forecaster of `tune-block-size`, with the order and the limits of a `run` with this
    configuration. passes: filled with its requests."""
    return lambda footprint: Forecaster(
        planner_for(config, footprint, device_of_codes(config.device, config.gpus)),
        block_sizes,
        config.window_tokens,
        passes.add,
    )


@dataclass(frozen=True)
class Workload:
    """Sums of the work of a run. chunks: parts of requests in passes. tokens: computed tokens. context_pairs: for each
    computed token, the number of tokens before it. restores: requests that resume from a snapshot."""

    passes: int
    chunks: int
    tokens: int
    context_pairs: float
    restores: int

    def prefill_s(self, measured: Measurement, snapshots: int) -> float:
        """Return the predicted seconds of prefill, with the cost of keeping the snapshots."""
        return (
            self.passes * measured.pass_s
            + self.chunks * measured.chunk_s
            + self.tokens * measured.token_s
            + self.context_pairs * measured.context_s
            + snapshots * measured.snapshot_s
        )


@dataclass(slots=True, eq=False)
class _Prefill:
    """Request in a simulated pass. left: tokens to compute. leader: the request that it waits for, or None."""

    conversation: int
    left: int
    leader: _Prefill | None


class PassCounter:
    """Simulated passes of a run in which each request generates one token. Requests are added in running order; only
    those that wait or run are held."""

    def __init__(self, max_batch_tokens: int, max_running: int) -> None:
        self._max_batch_tokens, self._max_running = max_batch_tokens, max_running
        self._latest: dict[int, _Prefill] = {}  # unfinished, by conversation
        self._waiting: list[_Prefill] = []
        self._running: list[_Prefill] = []
        self._passes = self._chunks = self._tokens = self._restores = 0
        self._pairs = 0.0

    def add(self, served: Served) -> None:
        """Add a request."""
        count, resume_at = served.length - served.resume_at, served.resume_at
        leader = self._latest.get(served.conversation) if resume_at else None
        one = self._latest[served.conversation] = _Prefill(served.conversation, count, leader)
        self._waiting.append(one)
        self._tokens += count
        self._restores += resume_at > 0
        self._pairs += count * (served.length - count / 2)
        while len(self._waiting) == LOOK_AHEAD * self._max_running:
            self._pass()

    def finish(self) -> Workload:
        """Return the work, after the last request."""
        while self._waiting or self._running:
            self._pass()
        return Workload(self._passes, self._chunks, self._tokens, self._pairs, self._restores)

    def _pass(self) -> None:
        passed_over, budget = list[_Prefill](), self._max_batch_tokens
        for one in self._waiting:
            free = len(self._running) < self._max_running and (one.leader is None or not one.leader.left)
            (self._running if free else passed_over).append(one)
        self._waiting = passed_over
        for one in self._running:
            count = min(budget, one.left)
            budget -= count
            one.left -= count
            self._chunks += count > 0
            if not one.left:
                one.leader = None
                if self._latest.get(one.conversation) is one:
                    del self._latest[one.conversation]
        self._running = [one for one in self._running if one.left]
        self._passes += 1


class Passes:
    """Simulated passes of a run at each block size; see Forecaster for `add`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._counters: dict[int, PassCounter] = {}

    def add(self, policy: Policy, block_size: int, served: Served) -> None:
        """Add a request, if the run has this policy."""
        if policy == self._config.policy:
            if block_size not in self._counters:
                self._counters[block_size] = PassCounter(self._config.max_batch_tokens, self._config.max_running)
            self._counters[block_size].add(served)

    def workload(self, block_size: int) -> Workload:
        """Return the work at a block size, after the last request."""
        planned = self._config.policy == "planned"  # the same at each block size
        return self._counters[self._config.block_size if planned else block_size].finish()
