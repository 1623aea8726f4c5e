"""Make the JSON documents of `--json`, and the YAML file for `--config`."""

from __future__ import annotations

from typing import Any

from apcbatch.config import Config
from apcbatch.tuning.choice import Candidate, Tuning
from apcbatch.tuning.forecast import Forecast, PolicyForecast
from apcbatch.tuning.occupancy import MemoryForecast
from apcbatch.types import Policy


def forecast_document(forecast: Forecast, policy: Policy, config: Config, memory: MemoryForecast) -> dict[str, Any]:
    """Make the document of `plan`, for one policy."""
    one = next(iter(forecast.grids.values()))[policy]
    ideal = {"ideal_hit_rate": one.ideal_hit_rate, "ideal_is_bound": one.ideal_is_bound}
    return {
        "dataset": _dataset(forecast) | ideal,
        "policy": policy,
        "model": config.model,
        "candidates": [_reuse(block_size, grid[policy], config) for block_size, grid in forecast.grids.items()],
        "memory": memory.as_dict(),
    }


def tuning_document(tuning: Tuning, config: Config) -> dict[str, Any]:
    """Make the document of `tune-block-size`."""
    return {
        "dataset": _dataset(tuning.forecast),
        "policy": config.policy,
        "model": config.model,
        "candidates": [_candidate(candidate, config) for candidate in tuning.candidates],
        "recommended": {
            "block_size": tuning.recommended.block_size,
            "min_gain_tokens": tuning.min_gain_tokens,
            "reason": tuning.reason,
        },
    }


def _dataset(forecast: Forecast) -> dict[str, Any]:
    """Return the part of both documents that describes the input."""
    return {
        "requests": forecast.requests,
        "prompt_tokens": forecast.prompt_tokens,
        "unique_tokens": forecast.unique_tokens,
        "unique_tokens_is_bound": forecast.unique_tokens_is_bound,
        "ideal_hit_rate": forecast.ideal_hit_rate,
        "ideal_is_bound": forecast.ideal_is_bound,
    }


def _reuse(block_size: int, table: PolicyForecast, config: Config) -> dict[str, Any]:
    """Return the part of both documents that describes one block size."""
    return {
        "block_size": block_size,
        "min_gain_tokens": config.gain_tokens,
        "cached_tokens": table.cached_tokens,
        "computed_tokens": table.computed_tokens,
        "hit_rate": table.hit_rate,
        "snapshots_written": table.snapshots_written,
        "snapshots_read": table.snapshots_read,
        "store_bytes": table.store_bytes,
        "peak_live_snapshots": table.peak_live_snapshots,
    }


def _candidate(candidate: Candidate, config: Config) -> dict[str, Any]:
    seconds = {"predicted_prefill_s": candidate.prefill_s}
    if candidate.verified is not None:
        seconds["measured_prefill_s"] = candidate.verified.prefill_s
    return _reuse(candidate.block_size, candidate.table, config) | seconds


def tuning_yaml(tuning: Tuning, config: Config) -> str:
    """Make a file for `--config` with the recommended options."""
    lines = [f"# {tuning.reason}", f"policy: {config.policy}", f"block_size: {tuning.recommended.block_size}"]
    return "\n".join([*lines, f"min_gain_tokens: {tuning.min_gain_tokens}", ""])
