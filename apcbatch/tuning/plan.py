"""`plan`: what a run would reuse under each policy on each grid, as lines for a terminal and as JSON.

Must not know: weights, torch, where the lines go. The numbers are those that `run` reports for the same
options on an empty store, request by request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from apcbatch.config import Config
from apcbatch.plan.forecast import Forecast, PolicyForecast, forecast
from apcbatch.plan.planner import Planner
from apcbatch.tuning.survey import Survey
from apcbatch.job.window import windows_note
from apcbatch.types import Policy
from apcbatch.values import rounded_size

BLOCK_SIZES = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
BAR_CELLS = 20
HEAD = (
    f"{'block':>6}  {'policy':<7}  {'hit rate':>8}  {'':<{BAR_CELLS}}  {'missed':>7}  {'kept':>11}  {'read':>9}  "
    f"{'for later':>9}  {'stored':>10}  {'live at once':>12}"
)


def forecast_of(
    config: Config, surveyed: Survey, block_sizes: Iterable[int], min_gain_tokens: int
) -> Forecast:
    """Every grid under every policy, with the memory and the disk that the configuration allows."""
    planner = Planner(
        block_size=config.block_size,
        order="file" if config.order == "file" else "auto",
        footprint=surveyed.footprint,
        capacity_bytes=config.pool_size,
        min_gain_tokens=min_gain_tokens,
        later_budget_bytes=config.store_size,
    )
    return forecast(surveyed.tree, block_sizes, planner, surveyed.num_unstable)


def dataset_json(made: Forecast) -> dict[str, Any]:
    """What the documents of `--json` say of the input itself."""
    return {
        "requests": made.requests,
        "prompt_tokens": made.prompt_tokens,
        "unique_tokens": made.unique_tokens,
        "ideal_hit_rate": made.ideal_hit_rate,
    }


def as_json(made: Forecast, policy: Policy, model: str, min_gain_tokens: int) -> dict[str, Any]:
    """The document of `--json`, for one policy."""
    return {
        "dataset": dataset_json(made),
        "policy": policy,
        "model": model,
        "candidates": [
            {
                "block_size": block_size,
                "min_gain_tokens": min_gain_tokens,
                "cached_tokens": grid[policy].cached_tokens,
                "computed_tokens": grid[policy].computed_tokens,
                "hit_rate": grid[policy].hit_rate,
                "snapshots_written": grid[policy].snapshots_written,
                "snapshots_read": grid[policy].snapshots_read,
                "store_bytes": grid[policy].store_bytes,
                "peak_live_snapshots": grid[policy].peak_live_snapshots,
            }
            for block_size, grid in made.grids.items()
        ],
    }


def as_lines(made: Forecast, surveyed: Survey, config: Config) -> Iterator[str]:
    """The whole report for a terminal."""
    yield (
        f"{_count(made.requests, 'request')} on {_count(surveyed.num_lines, 'line')}: {made.prompt_tokens:,} prompt "
        f"tokens, {made.unique_tokens:,} of them unique"
    )
    if surveyed.errors:
        codes = ", ".join(f"{count} {code}" for code, count in sorted(surveyed.errors.items()))
        yield f"{_count(surveyed.errors.total(), 'request')} cannot be answered and not planned: {codes}"
    yield (
        f"ideal hit rate {_percent(made.ideal_hit_rate)}: what earlier requests cover, token by token, working in "
        f"order {config.order}"
    )
    yield ""
    yield HEAD
    for block_size, grid in made.grids.items():
        for row, table in enumerate(grid.values()):
            yield _row(f"{block_size}" if row == 0 else "", table)
    yield ""
    yield from _limits(made, config)
    note = windows_note(surveyed.num_windows, config)
    if note is not None:
        yield f"  the window: {note}"


def _row(block_size: str, table: PolicyForecast) -> str:
    bar = "#" * round(BAR_CELLS * table.hit_rate)
    missed = table.floor_tokens / max(1, table.prompt_tokens)
    return (
        f"{block_size:>6}  {table.policy:<7}  {_percent(table.hit_rate):>8}  {bar:<{BAR_CELLS}}  "
        f"{_percent(missed):>7}  {table.snapshots_written:>11,}  {table.snapshots_read:>9,}  "
        f"{table.snapshots_for_later:>9,}  {rounded_size(table.store_bytes):>10}  {table.peak_live_snapshots:>12,}"
    )


def _limits(made: Forecast, config: Config) -> Iterator[str]:
    """What stands between the rate and 100 %."""

    def tokens(count: int) -> str:
        return f"{_count(count, 'token')} ({_percent(count / max(1, made.prompt_tokens))})"

    yield "What limits the hit rate:"
    yield f"  new: {tokens(made.prompt_tokens - made.ideal_tokens)} that no earlier request covers"
    own = made.grids[config.block_size]["planned"]
    yield (
        f"  the grid: {tokens(own.floor_tokens)} covered, but beyond the last snapshot, at block "
        f"{config.block_size} under planned"
    )
    yield (
        f"  rewritten history: {tokens(made.rewritten_tokens)} computed again, as "
        f"{_count(made.rewritten_prompts, 'prompt')} of {made.requests:,} do not begin with the one before in their "
        "conversation"
    )
    yield "  the chat template: " + (
        f"not prefix-stable in {_count(made.unstable_templates, 'conversation')}: earlier turns change later on"
        if made.unstable_templates
        else "prefix-stable"
    )
    for policy in ("all", "last"):
        large = [size for size, grid in made.grids.items() if grid[policy].peak_live_bytes > config.pool_size]
        if large:
            yield (
                f"  memory: `{policy}` keeps more than --pool-size {rounded_size(config.pool_size)} at block "
                f"{', '.join(map(str, large))}, so that its real rate is lower without a store"
            )


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
