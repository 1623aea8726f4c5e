"""`tune-block-size`: what each block size would reuse and how long that would take here, and which one to take.

Must not know: how anything is printed, written or drawn. Invariant: cached tokens are those that `run` reports with
the same options on an empty store, request by request, while all that is kept fits (see `notes`).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from apcbatch.config import Config
from apcbatch.data.render import Renderer
from apcbatch.data.source import open_source
from apcbatch.plan.forecast import Forecast, PolicyForecast, forecast
from apcbatch.plan.planner import Planner
from apcbatch.plan.tree_shape import TreeShape
from apcbatch.errors import UsageError
from apcbatch.job.answered import Answered
from apcbatch.job.feed import Failure, Feeder
from apcbatch.tuning.measurement import Measurement
from apcbatch.job.opening import make_engine
from apcbatch.tuning.workload import walk
from apcbatch.job.planned import PlannedFeeder
from apcbatch.tuning.survey import Survey
from apcbatch.job.totals import Totals
from apcbatch.job.window import windows_note
from apcbatch.model.locate import locate_model

BLOCK_SIZES = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
TIE = 1.01  # what is within 1 % of the fastest is as fast


@dataclass(frozen=True)
class Verified:
    """A real run: seconds of prefill, seconds of everything after loading, restored prompt tokens."""

    prefill_s: float
    total_s: float
    cached_tokens: int


@dataclass(frozen=True)
class Candidate:
    """One block size: what it reuses, and the seconds that this is predicted to take."""

    block_size: int
    table: PolicyForecast
    prefill_s: float
    restore_s: float
    write_s: float
    verified: Verified | None = None

    @property
    def total_s(self) -> float:
        """Predicted seconds of prefill, restores and writes."""
        return self.prefill_s + self.restore_s + self.write_s


@dataclass(frozen=True)
class Tuning:
    """Everything that was found; candidates ascend. min_gain_tokens: what a restore from disk costs, in tokens."""

    made: Forecast
    measured: Measurement
    candidates: list[Candidate]
    recommended: Candidate
    min_gain_tokens: int
    reason: str
    notes: list[str] = field(default_factory=list)


def check(config: Config) -> None:
    """Refuse what has nothing to tune; UsageError says what to give instead."""
    if config.policy == "none":
        raise UsageError(
            f"{config.origins['policy']} none: nothing is kept, so that there is no block size to choose; "
            "give --policy planned, all or last"
        )


def foresee(config: Config, surveyed: Survey, block_sizes: Iterable[int]) -> Forecast:
    """Every block size, in the order and within the limits that `run` has with this configuration."""
    planner = Planner(
        block_size=1,
        order=_order(config),
        footprint=surveyed.footprint,
        capacity_bytes=config.pool_size,
        min_gain_tokens=config.min_gain_tokens,
        later_budget_bytes=config.store_size if config.store is not None else 0,
    )
    return forecast(surveyed.tree, block_sizes, planner, surveyed.num_unstable)


def predict(config: Config, surveyed: Survey, made: Forecast, measured: Measurement) -> list[Candidate]:
    """What each block size of a forecast would take."""
    shape = TreeShape(surveyed.tree)
    order = shape.order(_order(config))
    candidates = []
    for block_size, grid in made.grids.items():
        table = grid[config.policy]
        work = walk(
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
                measured.prefill_s(work, kept),
                restores * restore_s,
                written * measured.write_byte_s,
            )
        )
    return candidates


def verify(
    config: Config,
    input: str,
    candidates: list[Candidate],
    count: int,
    warn: Callable[[str], None],
) -> list[Candidate]:
    """The candidates, the best `count` of them with a real run each, in a temporary store if there is to be one."""
    best = sorted(candidates, key=lambda candidate: candidate.total_s)[:count]
    sizes = {candidate.block_size for candidate in best}
    return [
        replace(candidate, verified=run_for_real(config, input, candidate.block_size, warn))
        if candidate.block_size in sizes
        else candidate
        for candidate in candidates
    ]


def run_for_real(config: Config, input: str, block_size: int, warn: Callable[[str], None]) -> Verified:
    """Serve the whole input with one new token a request, and write no answers."""
    beside = Path(config.store).absolute().parent if config.store else None
    with tempfile.TemporaryDirectory(dir=beside if beside and beside.is_dir() else None) as folder:
        store = str(Path(folder) / "store") if config.store else None
        own = replace(config, block_size=block_size, max_tokens=1, store=store)
        engine = make_engine(own, warn)
        try:
            return _serve(own, input, engine)
        finally:
            engine.abort()
            engine.close()


def _serve(config: Config, input: str, engine: Any) -> Verified:
    renderer = Renderer.load(locate_model(config.model), warn=lambda sentence: None)  # told by the survey
    requests = Feeder(config, open_source(input, config.format), renderer, Answered())
    is_planned = config.policy == "planned"
    feeder: Feeder | PlannedFeeder = PlannedFeeder(config, requests, engine) if is_planned else requests
    totals, begin = Totals(), time.perf_counter()
    while True:
        while engine.wants_more and not feeder.exhausted:
            work = feeder.next()
            if work is not None and not isinstance(work, Failure):
                engine.submit(replace(work, max_tokens=1))
        if not engine.num_unfinished:
            break
        for result in engine.step():
            if result.error is None:
                totals.add(result)
    engine.flush()
    total_s = time.perf_counter() - begin
    return Verified(engine.counters.seconds["prefill"], total_s, totals.cached_tokens)


def conclude(
    config: Config, surveyed: Survey, made: Forecast, measured: Measurement, candidates: list[Candidate]
) -> Tuning:
    """The choice: the fastest, by real runs where there are any; of those as fast, the one that keeps the least."""
    verified = [candidate for candidate in candidates if candidate.verified is not None]
    of = verified or candidates
    fastest = min(map(seconds_of, of))
    chosen = min(
        (candidate for candidate in of if seconds_of(candidate) <= TIE * fastest),
        key=lambda candidate: (
            candidate.table.written_bytes + candidate.table.store_bytes,
            candidate.block_size,
        ),
    )
    gain = max(1, math.ceil(measured.break_even_disk))
    reason = _reason(chosen, of, "measured" if verified else "predicted")
    return Tuning(
        made, measured, candidates, chosen, gain, reason, list(_notes(config, surveyed, candidates))
    )


def _order(config: Config) -> Any:
    """The order in which `run` works: the plan's, where there is one."""
    return "file" if config.order == "file" or config.policy != "planned" else "auto"


def seconds_of(candidate: Candidate) -> float:
    """What a candidate takes: measured where it was verified."""
    return candidate.total_s if candidate.verified is None else candidate.verified.total_s


def _reason(chosen: Candidate, of: list[Candidate], how: str) -> str:
    """Why this one, in one sentence."""
    others = [candidate for candidate in of if candidate is not chosen]
    text = (
        f"block size {chosen.block_size} is {how} to take {seconds_of(chosen):.2f} s and restores "
        f"{100 * chosen.table.hit_rate:.1f} % of the prompt tokens"
    )
    if not others:
        return text + "."
    next_best = min(others, key=seconds_of)
    share = seconds_of(next_best) / max(1e-9, seconds_of(chosen))
    if share <= TIE:
        return text + f", as fast as block size {next_best.block_size} within 1 %, and keeps less."
    return text + f"; the next best, {next_best.block_size}, takes {100 * (share - 1):.0f} % longer."


def _notes(config: Config, surveyed: Survey, candidates: list[Candidate]) -> Iterator[str]:
    """What makes a real run differ from the prediction."""
    note = windows_note(surveyed.num_windows, config) if config.policy == "planned" else None
    if note is not None:
        yield note
    large = [str(one.block_size) for one in candidates if one.table.peak_live_bytes > config.pool_size]
    if large and config.policy != "planned" and config.store is None:
        yield f"more is kept than --pool-size holds at block size {', '.join(large)}: its real hit rate is lower"
    if config.store is not None:
        yield "the store is taken to be empty at the start; what it holds already makes a run faster"
