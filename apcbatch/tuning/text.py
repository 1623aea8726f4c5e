"""Format the reports of `plan` and `tune-block-size` for a terminal: lines, and tables that drop columns to fit its
width."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from apcbatch.config import Config
from apcbatch.display import counted, wrap
from apcbatch.job.planning import MEASURED, windows_note
from apcbatch.option_values import rounded_size
from apcbatch.tuning.choice import Candidate, Tuning
from apcbatch.tuning.measurement import Measurement
from apcbatch.tuning.occupancy import MemoryForecast
from apcbatch.tuning.survey import Survey

GAP = "  "


@dataclass(frozen=True)
class Column:
    """Column of a table. cells: its width in characters. text: makes the cell of a row. need: columns with a higher
    number are dropped first if the table is too wide; 0 is never dropped. align: as in format()."""

    head: str
    cells: int
    text: Callable[[Any], str]
    need: int = 0
    align: str = ">"


class Table:
    """Table of the columns that fit a width; those with the highest `need` are dropped first. left_out: heads of the
    dropped columns."""

    def __init__(self, columns: Sequence[Column], width: int | None) -> None:
        self._columns = list(columns)
        self.left_out: list[str] = []
        while width is not None and sum(column.cells + len(GAP) for column in self._columns) > width + len(GAP):
            least = max(self._columns, key=lambda column: column.need)
            if not least.need:
                break
            self._columns.remove(least)
            self.left_out.append(least.head)

    def head(self) -> str:
        """Return the line of the heads."""
        return self._line([column.head for column in self._columns])

    def row(self, row: object) -> str:
        """Return one line. row: what the columns make their cells of."""
        return self._line([column.text(row) for column in self._columns])

    def _line(self, cells: Sequence[str]) -> str:
        pairs = zip(cells, self._columns, strict=True)
        return GAP.join(f"{cell:{column.align}{column.cells}}" for cell, column in pairs)

    def note(self) -> list[str]:
        """Return a line that names the dropped columns; no line if none was dropped."""
        named = [head for head in self.left_out if head]
        return [f"left out at this width: {', '.join(named)}; --json has them"] if named else []


BAR_CELLS = 20


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


FORECAST_COLUMNS = (
    Column("block", 6, lambda row: f"{row[0]}"),
    Column("policy", 7, lambda row: row[1].policy, align="<"),
    Column("hit rate", 8, lambda row: _percent(row[1].hit_rate)),
    Column("", BAR_CELLS, lambda row: "#" * round(BAR_CELLS * row[1].hit_rate), need=9, align="<"),
    Column("missed", 7, lambda row: _percent(row[1].floor_tokens / max(1, row[1].prompt_tokens)), need=2),
    Column("kept", 11, lambda row: f"{row[1].snapshots_written:,}", need=1),
    Column("read", 9, lambda row: f"{row[1].snapshots_read:,}", need=5),
    Column("for later", 9, lambda row: f"{row[1].snapshots_for_later:,}", need=6),
    Column("stored", 10, lambda row: rounded_size(row[1].store_bytes)),
    Column("live at once", 12, lambda row: f"{row[1].peak_live_snapshots:,}", need=4),
)
TUNING_COLUMNS = (
    Column("block", 6, lambda one: f"{one.block_size}"),
    Column("hit rate", 8, lambda one: _percent(one.table.hit_rate)),
    Column("cached", 11, lambda one: f"{one.table.cached_tokens:,}", need=7),
    Column("computed", 11, lambda one: f"{one.table.computed_tokens:,}", need=1),
    Column("written", 9, lambda one: f"{one.table.snapshots_written:,}", need=5),
    Column("read", 9, lambda one: f"{one.table.snapshots_read:,}", need=6),
    Column("kept", 10, lambda one: rounded_size(one.table.written_bytes), need=4),
    Column("stored", 10, lambda one: rounded_size(one.table.store_bytes), need=2),
    Column("live at once", 12, lambda one: f"{one.table.peak_live_snapshots:,}", need=3),
    Column("seconds", 9, lambda one: f"{one.total_s:.2f}"),
)
MARK = "  <- recommended"


def forecast_lines(
    surveyed: Survey, config: Config, width: int | None = None, memory: MemoryForecast | None = None
) -> Iterator[str]:
    """Yield the report of `plan`. width: the terminal's columns, None for a pipe."""
    table = Table(FORECAST_COLUMNS, width)
    told = ["", f"Memory: {memory.sentence}"] if memory is not None else []
    for line in chain(_forecast_lines(surveyed, config, table), told):
        yield from wrap(line, width, "    ")


def _forecast_lines(surveyed: Survey, config: Config, table: Table) -> Iterator[str]:
    forecast = surveyed.forecast
    yield (
        f"{counted(forecast.requests, 'request')} on {counted(surveyed.num_lines, 'line')}: {forecast.prompt_tokens:,} "
        f"prompt tokens, {forecast.unique_tokens:,} of them unique"
    )
    if surveyed.errors:
        codes = ", ".join(f"{count} {code}" for code, count in sorted(surveyed.errors.items()))
        yield f"{counted(surveyed.errors.total(), 'request')} cannot be answered or planned: {codes}"
    yield (
        f"ideal hit rate {_percent(forecast.ideal_hit_rate)}: what earlier requests cover, token by token, working in "
        f"order {config.order}"
    )
    yield ""
    yield table.head()
    for block_size, grid in forecast.grids.items():
        for row, one in enumerate(grid.values()):
            yield table.row((block_size if row == 0 else "", one))
    yield from table.note()
    yield (
        "block: the grid of all and last; of planned, whose snapshots for this run lie on none, that of what is kept "
        "for later runs (for later, stored)"
    )
    yield ""
    yield from _limits(surveyed, config)
    if config.origins["min_gain_tokens"] in ("default", MEASURED):
        why = (
            "taken to be what reading one costs, until a run measures it and keeps it in its --store"
            if config.min_gain_tokens is None
            else "which is what reading one costs, as a run with this --store has measured"
        )
        yield f"  for later runs: kept if it saves at least {counted(config.gain_tokens, 'token')}, {why}"
    note = windows_note(forecast.num_windows, config)
    if note is not None:
        yield f"  the window: {note}"


def _limits(surveyed: Survey, config: Config) -> Iterator[str]:
    """Yield the reasons why the hit rate is not 100 %."""
    forecast = surveyed.forecast

    def tokens(count: int) -> str:
        return f"{counted(count, 'token')} ({_percent(count / max(1, forecast.prompt_tokens))})"

    yield "What limits the hit rate:"
    yield f"  new: {tokens(forecast.prompt_tokens - forecast.ideal_tokens)} that no earlier request covers"
    own = forecast.grids[config.block_size]
    yield (
        f"  the plan: {tokens(own['planned'].floor_tokens)} covered, but computed again under planned, for lack of "
        "--pool-size or --window-tokens"
    )
    yield (
        f"  the grid: {tokens(own['all'].floor_tokens)} covered, but beyond the last snapshot, at block "
        f"{config.block_size} under all; the snapshots of planned lie where prompts part and end"
    )
    yield (
        f"  rewritten history: {tokens(forecast.rewritten_tokens)} computed again, as "
        f"{counted(forecast.rewritten_prompts, 'prompt')} of {forecast.requests:,} do not begin with the one before in "
        "their conversation"
    )
    unstable = surveyed.num_unstable - surveyed.without_thoughts
    if unstable or not surveyed.without_thoughts:
        where = f"not prefix-stable in {counted(unstable, 'conversation')}: earlier turns change later on"
        yield f"  the chat template: {where if unstable else 'prefix-stable'}"
    if surveyed.without_thoughts:
        given = json.dumps(surveyed.keeps_thoughts_with)
        yield (
            f"  thoughts: {tokens(forecast.thought_tokens)} computed again, as the chat template takes earlier "
            f"thoughts out of the history in {counted(surveyed.without_thoughts, 'conversation')}"
            + f"; --template-kwargs '{given}' keeps them"
            * bool(surveyed.keeps_thoughts_with)
        )
    for policy in ("all", "last"):
        large = [size for size, grid in forecast.grids.items() if grid[policy].peak_live_bytes > config.pool_size]
        if large:
            yield (
                f"  memory: `{policy}` keeps more than --pool-size {rounded_size(config.pool_size)} at block "
                f"{', '.join(map(str, large))}, so that its real rate is lower without a store"
            )


def tuning_lines(tuning: Tuning, config: Config, width: int | None = None) -> Iterator[str]:
    """Yield the report of `tune-block-size`. width: the terminal's columns, None for a pipe."""
    for line in _tuning_lines(tuning, config, width):
        yield from wrap(line, width, "    ")


def _tuning_lines(tuning: Tuning, config: Config, width: int | None) -> Iterator[str]:
    table = Table(TUNING_COLUMNS, None if width is None else width - len(MARK))
    has_bars = width is None or len(table.head() + "  " + MARK) + BAR_CELLS <= width
    forecast = tuning.forecast
    yield (
        f"{forecast.requests:,} requests: {forecast.prompt_tokens:,} prompt tokens, {forecast.unique_tokens:,} of "
        f"them unique; ideal hit rate {100 * forecast.ideal_hit_rate:.1f} %; policy {config.policy}"
    )
    yield ""
    yield from _measured(tuning.measured)
    yield ""
    yield table.head()
    longest = max(candidate.total_s for candidate in tuning.candidates)
    for candidate in tuning.candidates:
        bar = "#" * round(BAR_CELLS * candidate.total_s / max(1e-9, longest))
        mark = MARK if candidate is tuning.recommended else ""
        yield table.row(candidate) + f"  {bar:<{BAR_CELLS}}" * has_bars + mark
    yield from table.note()
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


def _verified(candidate: Candidate) -> str:
    """Format predicted and measured seconds of a candidate, side by side."""
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
