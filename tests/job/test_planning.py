"""How a configuration becomes a planner, and when a run is planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from apcbatch.config import Config
from apcbatch.data.model_files import model_files_digest
from apcbatch.engine.coverage import Match
from apcbatch.job.planning import (
    PlannedFeeder,
    order_of,
    planner_for,
    windows_note,
    with_earlier,
    with_measured_gain,
    with_recorded_gain,
    work_source,
)
from apcbatch.model.locate import locate_model
from apcbatch.plan.footprint import Footprint
from apcbatch.resolution import load
from apcbatch.store import Store
from apcbatch.types import RequestPlan

FOOTPRINT = Footprint(7)


FLAG = "--min-gain-tokens"


def test_what_is_measured_resolves_auto_alone() -> None:
    """Catches a user's number that a measurement replaces, and a measured one that the report calls the default."""
    for given, origin in [(None, "measured for this store"), ("auto", FLAG), ("9", FLAG)]:
        config = load({} if given is None else {"min_gain_tokens": given}, None, {})
        assert with_measured_gain(config, None) == config
        measured = with_measured_gain(config, 7)
        planner = planner_for(measured, FOOTPRINT, "cpu")
        assert measured.min_gain_tokens == planner.min_gain_tokens == (9 if given == "9" else 7)
        assert measured.origins["min_gain_tokens"] == origin
        assert planner_for(load({}, None, {}), FOOTPRINT, "cpu").min_gain_tokens == 64


def test_earlier_windows_raise_a_requests_ideal() -> None:
    """Fault: an ideal that no run could reach, a lower one than the window's own, or a bound that is called exact."""
    plan = RequestPlan(resume_at=2, ideal=4)
    for length, exact, ideal in ((9, True, 8), (10, True, 8), (6, True, 6), (3, True, 4), (3, False, 4), (6, False, 6)):
        found = with_earlier(plan, Match(length, False, exact), 9)
        assert found == replace(plan, ideal=ideal, is_ideal_exact=exact)


def test_a_gain_is_read_from_the_store(tmp_path: Path) -> None:
    """Catches a plan with another number than the runs of the store, and one of another dtype."""
    digest = model_files_digest(locate_model("demo"))
    with Store.open(tmp_path, warn=lambda sentence: None) as store:
        store.reading_tokens(digest, "float32", "a GPU", lambda: 700)
    for flags, tokens in (
        ({}, None),
        ({"store": tmp_path, "dtype": "float32"}, 700),
        ({"store": tmp_path, "dtype": "bfloat16"}, None),
    ):
        given = {name: str(value) for name, value in flags.items()}
        assert with_recorded_gain(load(given, None, {})).min_gain_tokens == tokens
    own = load({"store": str(tmp_path), "min_gain_tokens": "3"}, None, {})
    assert with_recorded_gain(own).min_gain_tokens == 3


def test_each_limit_comes_from_its_option() -> None:
    """Catches two options that are exchanged, and a store's size that counts without a store."""
    config = Config(block_size=3, pool_size=100, min_gain_tokens=5, store_size=200)
    planner = planner_for(config, FOOTPRINT, "cpu")
    assert (planner.block_size, planner.footprint, planner.capacity_bytes) == (3, FOOTPRINT, 100)
    assert (planner.min_gain_tokens, planner.later_budget_bytes) == (5, 0)
    stored = Config(store="s", store_size=200)
    assert planner_for(stored, FOOTPRINT, "cpu").later_budget_bytes == 200
    assert planner_for(stored, FOOTPRINT, "cpu", later_budget_bytes=9).later_budget_bytes == 9
    assert planner_for(config, FOOTPRINT, "cpu", later_budget_bytes=0).later_budget_bytes == 0


def test_what_is_reserved_is_not_planned_with() -> None:
    """Catches a plan that fills the place of a snapshot that is read from the store, and a room below nothing."""
    config = Config(pool_size=100)
    assert planner_for(config, FOOTPRINT, "cpu", reserved_bytes=30).capacity_bytes == 70
    assert planner_for(config, FOOTPRINT, "cpu", reserved_bytes=101).capacity_bytes == 0


def test_only_a_plan_changes_the_order() -> None:
    """Catches a forecast for `all` in an order in which no run works, and memory taken where it gains nothing."""
    for device, policy, order, ray, expected in [
        ("cpu", "planned", "auto", None, "short first"),
        ("cuda", "planned", "auto", None, "long first"),
        ("cuda", "planned", "auto", "local", "short first"),
        ("cuda", "planned", "file", None, "file"),
        ("cpu", "all", "auto", None, "file"),
        ("cuda", "last", "file", None, "file"),
    ]:
        config = Config(policy=policy, order=order, ray=ray)
        assert order_of(config, device) == planner_for(config, FOOTPRINT, device).order == expected


def test_a_run_is_planned_if_its_prompts_are_known() -> None:
    """Catches a rollout that is planned as if its prompts were recorded, and a plan for a policy that has none."""
    for policy, turns, is_planned in [
        ("planned", "each", True),
        ("planned", "last", True),
        ("planned", "rollout", False),
        ("all", "each", False),
    ]:
        feeder, engine = SimpleNamespace(), SimpleNamespace()
        source = work_source(Config(policy=policy, turns=turns), feeder, engine)  # type: ignore[arg-type]
        assert isinstance(source, PlannedFeeder) == is_planned
        assert is_planned or source is feeder


def test_a_forecast_names_the_windows_of_the_run() -> None:
    """Fault: a forecast does not say that not all is planned at once, or says so of a first window."""
    for num_windows, note in [(0, None), (2, None), (3, "the input is planned in 3 windows, ")]:
        found = windows_note(num_windows, Config(window_tokens=2000))
        assert (found is None) == (note is None)
        assert found is None or (found.startswith(str(note)) and "--window-tokens 2,000;" in found)
