"""The lines of `plan` and of `tune-block-size` for a terminal.

Must not know: how anything was found, where it goes.
"""

from __future__ import annotations

from collections.abc import Iterator

from apcbatch.config import Config
from apcbatch.job.window import windows_note
from apcbatch.plan.forecast import Forecast, PolicyForecast
from apcbatch.tuning.candidate import Candidate
from apcbatch.tuning.choice import Tuning
from apcbatch.tuning.measurement import Measurement
from apcbatch.tuning.survey import Survey
from apcbatch.values import rounded_size

BAR_CELLS = 20
FORECAST_HEAD = (
    f"{'block':>6}  {'policy':<7}  {'hit rate':>8}  {'':<{BAR_CELLS}}  {'missed':>7}  {'kept':>11}  {'read':>9}  "
    f"{'for later':>9}  {'stored':>10}  {'live at once':>12}"
)
TUNING_HEAD = (
    f"{'block':>6}  {'hit rate':>8}  {'cached':>11}  {'computed':>11}  {'written':>9}  {'read':>9}  {'kept':>10}  "
    f"{'stored':>10}  {'live at once':>12}  {'seconds':>9}"
)


def forecast_lines(made: Forecast, surveyed: Survey, config: Config) -> Iterator[str]:
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
    yield FORECAST_HEAD
    for block_size, grid in made.grids.items():
        for row, table in enumerate(grid.values()):
            yield _forecast_row(f"{block_size}" if row == 0 else "", table)
    yield ""
    yield from _limits(made, config)
    note = windows_note(surveyed.num_windows, config)
    if note is not None:
        yield f"  the window: {note}"


def _forecast_row(block_size: str, table: PolicyForecast) -> str:
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


def tuning_lines(tuning: Tuning, config: Config) -> Iterator[str]:
    """The whole report for a terminal."""
    made = tuning.made
    yield (
        f"{made.requests:,} requests: {made.prompt_tokens:,} prompt tokens, {made.unique_tokens:,} of them unique; "
        f"ideal hit rate {100 * made.ideal_hit_rate:.1f} %; policy {config.policy}"
    )
    yield ""
    yield from _measured(tuning.measured)
    yield ""
    yield TUNING_HEAD
    longest = max(candidate.total_s for candidate in tuning.candidates)
    for candidate in tuning.candidates:
        mark = "  <- recommended" if candidate is tuning.recommended else ""
        yield _tuning_row(candidate, longest) + mark
    yield ""
    verified = [candidate for candidate in tuning.candidates if candidate.verified is not None]
    for candidate in verified:
        yield _verified(candidate)
    if verified:
        yield ""
    for note in tuning.notes:
        yield f"note: {note}"
    yield f"Recommended: --block-size {tuning.recommended.block_size} --min-gain-tokens {tuning.min_gain_tokens}"
    yield (
        f"{tuning.reason[0].upper()}{tuning.reason[1:]} A restore from disk costs as much as computing "
        f"{tuning.min_gain_tokens} token{'s' * (tuning.min_gain_tokens != 1)}."
    )


def _measured(measured: Measurement) -> Iterator[str]:
    yield "Measured here with this model:"
    for rate in measured.rates:
        behind = f" behind {rate.context:,} restored ones" if rate.context else ""
        chunks = f"{rate.sequences} chunks of {rate.chunk:,}" if rate.sequences > 1 else f"a chunk of {rate.chunk:,}"
        yield f"  prefill, {chunks} tokens{behind}: {rate.tokens_per_s:,.0f} tokens/s"
    yield f"  a snapshot kept in the pass: {_milliseconds(measured.snapshot_s)}"
    yield (
        f"  a restore from RAM: {_milliseconds(measured.restore_ram_s)}, worth {measured.break_even_ram:,.1f} tokens; "
        f"from disk: {_milliseconds(measured.restore_disk_s)}, worth {measured.break_even_disk:,.1f} tokens"
    )
    yield f"  a write: {_milliseconds(measured.write_byte_s * (1 << 20))} a MiB"


def _tuning_row(candidate: Candidate, longest: float) -> str:
    table = candidate.table
    bar = "#" * round(BAR_CELLS * candidate.total_s / max(1e-9, longest))
    return (
        f"{candidate.block_size:>6}  {100 * table.hit_rate:>6.1f} %  {table.cached_tokens:>11,}  "
        f"{table.computed_tokens:>11,}  {table.snapshots_written:>9,}  {table.snapshots_read:>9,}  "
        f"{rounded_size(table.written_bytes):>10}  {rounded_size(table.store_bytes):>10}  "
        f"{table.peak_live_snapshots:>12,}  {candidate.total_s:>9.2f}  {bar:<{BAR_CELLS}}"
    )


def _verified(candidate: Candidate) -> str:
    """Predicted against measured."""
    real = candidate.verified
    assert real is not None
    off = 100 * (candidate.prefill_s / real.prefill_s - 1) if real.prefill_s else 0.0
    same = "as predicted" if real.cached_tokens == candidate.table.cached_tokens else "NOT as predicted"
    return (
        f"block {candidate.block_size}: prefill predicted {candidate.prefill_s:.2f} s, measured {real.prefill_s:.2f} s "
        f"({off:+.0f} %), the whole run {real.total_s:.2f} s; cached tokens predicted "
        f"{candidate.table.cached_tokens:,}, measured {real.cached_tokens:,}: {same}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f} ms"
