"""The forecasts of `plan` and of `tune-block-size`: every block size under every policy, without running anything.

Must not know: weights, torch, how anything is printed. Invariant: the numbers are those that `run` reports with the
same options on an empty store, request by request, if everything that is kept fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from apcbatch.config import Config
from apcbatch.job.planning import planner_for
from apcbatch.plan.forecast import Forecast, forecast
from apcbatch.tuning.survey import Survey


def forecast_policies(config: Config, surveyed: Survey, block_sizes: Iterable[int]) -> Forecast:
    """What `plan` compares: all policies in the order of --order, with --store-size on disk even without a --store."""
    planned = replace(config, policy="planned")
    planner = planner_for(planned, surveyed.footprint, later_budget_bytes=config.store_size)
    return forecast(surveyed.tree, block_sizes, planner, surveyed.num_unstable)


def forecast_run(config: Config, surveyed: Survey, block_sizes: Iterable[int]) -> Forecast:
    """What `tune-block-size` compares: the order and the limits that `run` has with this configuration."""
    planner = planner_for(config, surveyed.footprint)
    return forecast(surveyed.tree, block_sizes, planner, surveyed.num_unstable)
