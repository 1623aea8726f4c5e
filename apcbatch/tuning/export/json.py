"""The documents of `--json`: those of `plan` and of `tune-block-size`.

Must not know: how anything was found, where it goes.
"""

from __future__ import annotations

from typing import Any

from apcbatch.config import Config
from apcbatch.plan.forecast import Forecast, PolicyForecast
from apcbatch.tuning.candidate import Candidate
from apcbatch.tuning.choice import Tuning
from apcbatch.types import Policy


def forecast_document(made: Forecast, policy: Policy, config: Config) -> dict[str, Any]:
    """The document of `plan`, for one policy."""
    ideal = next(grid[policy].ideal_hit_rate for grid in made.grids.values())
    return {
        "dataset": _dataset(made) | {"ideal_hit_rate": ideal},
        "policy": policy,
        "model": config.model,
        "candidates": [_reuse(block_size, grid[policy], config) for block_size, grid in made.grids.items()],
    }


def tuning_document(tuning: Tuning, config: Config) -> dict[str, Any]:
    """The document of `tune-block-size`."""
    return {
        "dataset": _dataset(tuning.made),
        "policy": config.policy,
        "model": config.model,
        "candidates": [_candidate(candidate, config) for candidate in tuning.candidates],
        "recommended": {
            "block_size": tuning.recommended.block_size,
            "min_gain_tokens": tuning.min_gain_tokens,
            "reason": tuning.reason,
        },
    }


def _dataset(made: Forecast) -> dict[str, Any]:
    """What both say of the input itself."""
    return {
        "requests": made.requests,
        "prompt_tokens": made.prompt_tokens,
        "unique_tokens": made.unique_tokens,
        "ideal_hit_rate": made.ideal_hit_rate,
    }


def _reuse(block_size: int, table: PolicyForecast, config: Config) -> dict[str, Any]:
    """What both say of one block size."""
    return {
        "block_size": block_size,
        "min_gain_tokens": config.min_gain_tokens,
        "cached_tokens": table.cached_tokens,
        "computed_tokens": table.computed_tokens,
        "hit_rate": table.hit_rate,
        "snapshots_written": table.snapshots_written,
        "snapshots_read": table.snapshots_read,
        "store_bytes": table.store_bytes,
        "peak_live_snapshots": table.peak_live_snapshots,
    }


def _candidate(candidate: Candidate, config: Config) -> dict[str, Any]:
    verified = candidate.verified
    measured = {} if verified is None else {"measured_prefill_s": verified.prefill_s}
    return {
        **_reuse(candidate.block_size, candidate.table, config),
        "predicted_prefill_s": candidate.prefill_s,
        **measured,
    }
