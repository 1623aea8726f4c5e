"""Choose the block size that `tune-block-size` recommends, and say why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from apcbatch.config import Config
from apcbatch.errors import UsageError
from apcbatch.job.planning import windows_note
from apcbatch.tuning.forecast import Forecast, PolicyForecast
from apcbatch.tuning.measurement import Measurement

TIE = 1.01  # candidates within 1 % of the fastest count as equal


@dataclass(frozen=True)
class Tuning:
    """Result of `tune-block-size`. candidates: by ascending block size. min_gain_tokens: tokens that prefill computes
    in the time of one restore from disk."""

    forecast: Forecast
    measured: Measurement
    candidates: list[Candidate]
    recommended: Candidate
    min_gain_tokens: int
    reason: str
    notes: list[str] = field(default_factory=list)


def check(config: Config) -> None:
    """Raise UsageError for a configuration that leaves nothing to tune; it says what to give instead."""
    if config.policy == "none":
        raise UsageError(
            f"{config.origins['policy']} none: nothing is kept, so that there is no block size to choose; "
            "give --policy planned, all or last"
        )


def conclude(config: Config, forecast: Forecast, measured: Measurement, candidates: list[Candidate]) -> Tuning:
    """Choose the fastest candidate. Candidates within 1 % of it are ties, which go to --block-size under `planned`,
    whose snapshots for this run are the same on every grid, and then to the fewest bytes kept. After real runs, only
    the verified candidates are compared."""
    verified = [candidate for candidate in candidates if candidate.verified is not None]
    compared = verified or candidates
    fastest = min(candidate.best_known_s for candidate in compared)
    chosen = min(
        (candidate for candidate in compared if candidate.best_known_s <= TIE * fastest),
        key=lambda candidate: (
            config.policy == "planned" and candidate.block_size != config.block_size,
            candidate.table.written_bytes + candidate.table.store_bytes,
            candidate.block_size,
        ),
    )
    gain = max(1, math.ceil(measured.break_even_disk))
    reason = _reason(chosen, compared, "measured" if verified else "predicted")
    return Tuning(forecast, measured, candidates, chosen, gain, reason, list(_notes(config, forecast, candidates)))


def _reason(chosen: Candidate, compared: list[Candidate], how: str) -> str:
    others = [candidate for candidate in compared if candidate is not chosen]
    text = (
        f"block size {chosen.block_size} is {how} to take {chosen.best_known_s:.2f} s and restores "
        f"{100 * chosen.table.hit_rate:.1f} % of the prompt tokens"
    )
    if not others:
        return text + "."
    next_best = min(others, key=lambda candidate: candidate.best_known_s)
    share = next_best.best_known_s / max(1e-9, chosen.best_known_s)
    if share <= TIE:
        text += f", as fast as block size {next_best.block_size} within 1 %"
        return text + ("." if chosen.table.policy == "planned" else ", and keeps less.")
    return text + f"; the next best, {next_best.block_size}, takes {100 * (share - 1):.0f} % longer."


def _notes(config: Config, forecast: Forecast, candidates: list[Candidate]) -> Iterator[str]:
    """Yield reasons why a real run will differ from the prediction."""
    if config.policy == "planned":
        yield (
            "under planned a run restores the same at each block size, as its snapshots lie where prompts part and "
            "end; the block size is the grid of what later runs find in a --store"
        )
        if (note := windows_note(forecast.num_windows, config)) is not None:
            yield note
    large = [str(one.block_size) for one in candidates if one.table.peak_live_bytes > config.pool_size]
    if large and config.policy != "planned" and config.store is None:
        yield f"more is kept than --pool-size holds at block size {', '.join(large)}: its real hit rate is lower"
    if config.store is not None:
        yield "the store is taken to be empty at the start; what it holds already makes a run faster"


@dataclass(frozen=True)
class Verified:
    """Measurements of a real run: seconds of prefill, seconds of the whole run without loading, restored prompt
    tokens."""

    prefill_s: float
    total_s: float
    cached_tokens: int


@dataclass(frozen=True)
class Candidate:
    """One block size with the forecast of its reuse, and the predicted seconds."""

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

    @property
    def best_known_s(self) -> float:
        """Seconds of the whole run: measured if verified, else predicted."""
        return self.total_s if self.verified is None else self.verified.total_s
