"""What `tune-block-size` concludes from seconds that are made up: the choice, its reason, the notes, the picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.cli.options import BLOCK_SIZES
from apcbatch.config import Config
from apcbatch.resolution import load
from apcbatch.tuning.choice import Candidate, Tuning, Verified, conclude
from apcbatch.tuning.forecast import PolicyForecast, Served
from apcbatch.tuning.measurement import Measurement, Rate
from apcbatch.tuning.prediction import Passes, predict

COSTS = Measurement((Rate(1, 64, 0, 1000.0),), 0.5, 0.1, 0.01, 0.0, 0.25, 0.02, 0.0105, 1e-3)
MADE: Any = SimpleNamespace(num_windows=1)


def table(written: int = 100, store: int = 0, peak: int = 0) -> PolicyForecast:
    return PolicyForecast("all", 200, 60, 3, 1, 2, written, store, 1, peak, 0)


def candidate(size: int, total_s: float, real_s: float | None = None, **of_table: int) -> Candidate:
    """One whose seconds are all prefill."""
    verified = None if real_s is None else Verified(real_s / 2, real_s, 60)
    return Candidate(size, table(**of_table), total_s, 0.0, 0.0, verified)


def chosen(*candidates: Candidate, config: Config | None = None) -> Tuning:
    return conclude(config or load({"policy": "all"}, None, {}), MADE, COSTS, list(candidates))


def test_within_a_hundredth_it_is_the_bytes_that_decide() -> None:
    """Catches a tie that is none, one that is not seen, and bytes of the store, or the smaller block, left out."""
    assert chosen(candidate(1, 1.0, written=9), candidate(2, 1.01, written=8)).recommended.block_size == 2
    assert chosen(candidate(1, 1.0, written=9), candidate(2, 1.011, written=8)).recommended.block_size == 1
    assert chosen(candidate(1, 1.0, written=9), candidate(2, 1.0, written=8, store=2)).recommended.block_size == 1
    assert chosen(candidate(2, 1.0), candidate(1, 1.0)).recommended.block_size == 1
    planned = load({"policy": "planned", "block_size": 2}, None, {})
    for real, expected in ((1.01, 2), (1.02, 1)):
        assert chosen(candidate(1, 1.0), candidate(2, real), config=planned).recommended.block_size == expected


def test_the_reason_names_the_numbers() -> None:
    """Catches a share, a second or a block size in the sentence that is another's."""
    only = "block size 16 is predicted to take 2.00 s and restores 30.0 % of the prompt tokens"
    assert chosen(candidate(16, 2.0)).reason == only + "."
    slower = chosen(candidate(16, 2.0), candidate(32, 5.0), candidate(64, 3.0))
    assert slower.reason == only + "; the next best, 64, takes 50 % longer."
    tie = chosen(candidate(16, 2.0), candidate(32, 2.02, written=200))
    assert tie.reason == only + ", as fast as block size 32 within 1 %, and keeps less."
    brief = chosen(candidate(16, 0.25), candidate(32, 0.5))
    assert brief.reason.endswith("; the next best, 32, takes 100 % longer.")
    nothing = chosen(candidate(16, 0.0), candidate(32, 0.0, written=200))
    assert nothing.reason.endswith(", as fast as block size 32 within 1 %, and keeps less."), "no time at all"
    real = chosen(candidate(16, 9.0, real_s=2.0), candidate(32, 1.0), candidate(64, 8.0, real_s=4.0))
    assert real.recommended.block_size == 16
    assert real.reason == only.replace("predicted", "measured") + "; the next best, 64, takes 100 % longer."


def test_the_least_gain_is_what_a_restore_costs() -> None:
    """Catches a snapshot that costs more to read than to compute again, and a gain of no token."""
    for restore_s, gain in [(0.0105, 11), (0.010, 10), (0.0, 1), (0.0001, 1)]:
        costs = replace(COSTS, restore_disk_s=restore_s)
        assert conclude(load({}, None, {}), MADE, costs, [candidate(1, 1.0)]).min_gain_tokens == gain


def test_what_makes_a_run_differ_is_said() -> None:
    """Catches a note that is missing, or given where it does not hold: each at its bound."""

    def notes(peak: int = 0, windows: int = 1, **flags: object) -> str:
        config = load({"pool_size": 1000, **flags}, None, {})
        made: Any = SimpleNamespace(num_windows=windows)
        return "\n".join(conclude(config, made, COSTS, [candidate(8, 1.0, peak=peak)]).notes)

    assert notes(peak=1000, policy="all") == notes(windows=3, policy="all") == ""
    assert "the same at each block size" in notes() and "\n" not in notes()
    assert "in 3 windows, each of at most --window-tokens 9,000; " in notes(windows=3, window_tokens=9000)
    assert "than --pool-size holds at block size 8: its real hit rate is lower" in notes(peak=1001, policy="all")
    assert notes(peak=1001) == notes(), "a plan keeps within it"
    assert notes(peak=1001, policy="all", store="s") == notes(policy="all", store="s")
    assert "the store is taken to be empty" in notes(store="s")


def test_restores_and_writes_are_charged_where_they_happen() -> None:
    """Catches a restore that is charged to the wrong place, a write beyond the store's size, and snapshots for later
    runs that cost nothing."""
    for flags, peak, restore_s, write_s in [
        ({}, 2000, 0.04, 0.0),
        ({"store": "s"}, 1000, 0.04, 0.7),
        ({"store": "s"}, 1001, 0.021, 0.7),
        ({"store": "s", "store_size": 300}, 0, 0.04, 0.3),
    ]:
        config = load({"pool_size": 1000, "max_batch_tokens": 4096, **flags}, None, {})
        passes = Passes(config)
        for index, (length, resume_at) in enumerate([(100, 0), (100, 60), (70, 60)]):
            passes.add("planned", config.block_size, Served(index, index, length, resume_at, resume_at))
            passes.add("all", config.block_size, Served(index, index, length, 0, 0))
        forecast: Any = SimpleNamespace(grids={4: {"planned": table(store=700, peak=peak)}})
        [found] = predict(config, forecast, passes, COSTS)
        assert (found.block_size, found.restore_s, found.write_s) == pytest.approx((4, restore_s, write_s))
        # One pass, three chunks, 150 tokens, three snapshots for this run and two for later ones.
        assert found.prefill_s == pytest.approx(0.5 + 0.3 + 1.5 + 5 * 0.25)
        assert found.total_s == pytest.approx(found.prefill_s + restore_s + write_s)


def test_the_block_sizes_are_those_of_the_documentation() -> None:
    """Catches a grid that the documentation does not have, for either command."""
    told = " ".join((Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8").split())
    sizes = ",".join(map(str, BLOCK_SIZES))
    assert f"besides {sizes};" in told and f" {sizes}]" in told
