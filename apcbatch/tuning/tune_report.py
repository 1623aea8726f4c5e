"""What `tune-block-size` found, as lines for a terminal, as JSON and as YAML.

Must not know: how anything was found, where it goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apcbatch.config import Config
from apcbatch.tuning.measurement import Measurement
from apcbatch.tuning.plan import dataset_json
from apcbatch.tuning.tune import Candidate, Tuning
from apcbatch.values import rounded_size

BAR_CELLS = 20
HEAD = (
    f"{'block':>6}  {'hit rate':>8}  {'cached':>11}  {'computed':>11}  {'written':>9}  {'read':>9}  {'kept':>10}  "
    f"{'stored':>10}  {'live at once':>12}  {'seconds':>9}"
)


def as_lines(tuning: Tuning, config: Config) -> Iterator[str]:
    """The whole report for a terminal."""
    made = tuning.made
    yield (
        f"{made.requests:,} requests: {made.prompt_tokens:,} prompt tokens, {made.unique_tokens:,} of them unique; "
        f"ideal hit rate {100 * made.ideal_hit_rate:.1f} %; policy {config.policy}"
    )
    yield ""
    yield from _measured(tuning.measured)
    yield ""
    yield HEAD
    longest = max(candidate.total_s for candidate in tuning.candidates)
    for candidate in tuning.candidates:
        mark = "  <- recommended" if candidate is tuning.recommended else ""
        yield _row(candidate, longest) + mark
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
        chunks = (
            f"{rate.sequences} chunks of {rate.chunk:,}"
            if rate.sequences > 1
            else f"a chunk of {rate.chunk:,}"
        )
        yield f"  prefill, {chunks} tokens{behind}: {rate.tokens_per_s:,.0f} tokens/s"
    yield f"  a snapshot kept in the pass: {_milliseconds(measured.snapshot_s)}"
    yield (
        f"  a restore from RAM: {_milliseconds(measured.restore_ram_s)}, worth {measured.break_even_ram:,.1f} tokens; "
        f"from disk: {_milliseconds(measured.restore_disk_s)}, worth {measured.break_even_disk:,.1f} tokens"
    )
    yield f"  a write: {_milliseconds(measured.write_byte_s * (1 << 20))} a MiB"


def _row(candidate: Candidate, longest: float) -> str:
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


def as_json(tuning: Tuning, config: Config) -> dict[str, Any]:
    """The document of `--json`."""
    return {
        "dataset": dataset_json(tuning.made),
        "policy": config.policy,
        "model": config.model,
        "candidates": [_candidate_json(candidate, config) for candidate in tuning.candidates],
        "recommended": {
            "block_size": tuning.recommended.block_size,
            "min_gain_tokens": tuning.min_gain_tokens,
            "reason": tuning.reason,
        },
    }


def as_yaml(tuning: Tuning, config: Config) -> str:
    """A file for `--config`."""
    lines = [f"# {tuning.reason}", f"policy: {config.policy}", f"block_size: {tuning.recommended.block_size}"]
    return "\n".join([*lines, f"min_gain_tokens: {tuning.min_gain_tokens}", ""])


def _candidate_json(candidate: Candidate, config: Config) -> dict[str, Any]:
    table, verified = candidate.table, candidate.verified
    measured = {} if verified is None else {"measured_prefill_s": verified.prefill_s}
    return {
        "block_size": candidate.block_size,
        "min_gain_tokens": config.min_gain_tokens,
        "cached_tokens": table.cached_tokens,
        "computed_tokens": table.computed_tokens,
        "hit_rate": table.hit_rate,
        "snapshots_written": table.snapshots_written,
        "snapshots_read": table.snapshots_read,
        "store_bytes": table.store_bytes,
        "peak_live_snapshots": table.peak_live_snapshots,
        "predicted_prefill_s": candidate.prefill_s,
        **measured,
    }
