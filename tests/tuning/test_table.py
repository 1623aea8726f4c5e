"""The reports and documents of made-up numbers, and tables of any width: what does not fit is left out and named."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from apcbatch.job.planning import with_measured_gain
from apcbatch.resolution import load
from apcbatch.tuning.choice import Candidate, Tuning, Verified
from apcbatch.tuning.documents import forecast_document, tuning_document
from apcbatch.tuning.forecast import Forecast, PolicyForecast
from apcbatch.tuning.measurement import Measurement, Rate
from apcbatch.tuning.text import FORECAST_COLUMNS, TUNING_COLUMNS, Table, forecast_lines, tuning_lines


def test_each_width() -> None:
    """Fault: a row is longer than the terminal, a column vanishes unsaid, or a wider terminal shows less."""
    for columns, row in ((FORECAST_COLUMNS, (16, NEAR["planned"])), (TUNING_COLUMNS, CANDIDATES[0])):
        before = set()
        for width in range(50, 140):
            table = Table(columns, width)
            assert len(table.head()) <= width
            assert len(table.row(row)) == len(table.head())
            shown = {column.head for column in columns} - set(table.left_out)
            assert before <= shown and {column.head for column in columns if not column.need} <= shown
            assert all(head in "".join(table.note()) for head in table.left_out)
            before = shown
        assert not Table(columns, None).left_out and not Table(columns, 200).note()
        assert Table(columns, None).head() == Table(columns, 200).head()
        full = len(Table(columns, None).head())
        assert [len(Table(columns, width).left_out) for width in (full, full - 1)] == [0, 1]


def test_what_is_needed_least_is_left_out_first() -> None:
    """Fault: a narrow terminal loses a column that the choice rests on before one that it does not."""
    forecast_heads = ["", "for later", "read", "live at once", "missed", "kept"]
    assert Table(FORECAST_COLUMNS, 1).left_out == forecast_heads
    tuning_heads = ["cached", "read", "written", "kept", "live at once", "stored", "computed"]
    assert Table(TUNING_COLUMNS, 1).left_out == tuning_heads


def policy(name: Any, cached: int, peak: int) -> PolicyForecast:
    return PolicyForecast(name, 2000, cached, 1234, 56, 7, 3 << 20, 5 << 20, 89, peak, 100)


NEAR, FAR = (
    {name: policy(name, cached, peak) for name in ("planned", "all", "last")}
    for cached, peak in ((1500, 1999), (399, 2000))
)
FORECAST = Forecast(2, 2000, 1400, True, 1600, False, 3, 1, 300, 0, {16: NEAR, 64: FAR})
SURVEY: Any = SimpleNamespace(
    forecast=FORECAST, num_lines=1, errors=Counter(invalid_json=2, duplicate_id=1), num_unstable=1, without_thoughts=0
)
RATES = (Rate(1, 2048, 0, 12345.6), Rate(32, 16, 0, 2000.0), Rate(2, 64, 1984, 1500.4))
CANDIDATES = [
    Candidate(16, NEAR["planned"], 1.5, 0.25, 0.25, Verified(0.5, 2.5, 1500)),
    Candidate(64, FAR["planned"], 3.0, 0.5, 0.5, Verified(4.0, 5.0, 398)),
    Candidate(128, FAR["planned"], 1.0, 0.0, 0.0),
]
MEMORY: Any = SimpleNamespace(as_dict=dict, sentence="about 1 GiB")
COSTS = Measurement(RATES, 0.5, 0.1, 0.01, 0.0, 0.00025, 0.0002, 0.0105, 1e-8)
TUNING = Tuning(FORECAST, COSTS, CANDIDATES, CANDIDATES[0], 11, "the reason.", ["a note"])

PLAN_REPORT = """\
2 requests on 1 line: 2,000 prompt tokens, 1,400 of them unique
3 requests cannot be answered or planned: 1 duplicate_id, 2 invalid_json
ideal hit rate 80.0 %: what earlier requests cover, token by token, working in order auto

 block  policy   hit rate                         missed         kept       read  for later      stored  live at once
    16  planned    75.0 %  ###############         5.0 %        1,234         56          7     5.0 MiB            89
        all        75.0 %  ###############         5.0 %        1,234         56          7     5.0 MiB            89
        last       75.0 %  ###############         5.0 %        1,234         56          7     5.0 MiB            89
    64  planned    20.0 %  ####                    5.0 %        1,234         56          7     5.0 MiB            89
        all        20.0 %  ####                    5.0 %        1,234         56          7     5.0 MiB            89
        last       20.0 %  ####                    5.0 %        1,234         56          7     5.0 MiB            89
block: the grid of all and last; of planned, whose snapshots for this run lie on none, that of what is kept for later
    runs (for later, stored)

What limits the hit rate:
  new: 400 tokens (20.0 %) that no earlier request covers
  the plan: 100 tokens (5.0 %) covered, but computed again under planned, for lack of --pool-size or --window-tokens
  the grid: 100 tokens (5.0 %) covered, but beyond the last snapshot, at block 16 under all; the snapshots of planned
    lie where prompts part and end
  rewritten history: 300 tokens (15.0 %) computed again, as 1 prompt of 2 do not begin with the one before in their
    conversation
  the chat template: not prefix-stable in 1 conversation: earlier turns change later on
  memory: `all` keeps more than --pool-size 2.0 KiB at block 64, so that its real rate is lower without a store
  memory: `last` keeps more than --pool-size 2.0 KiB at block 64, so that its real rate is lower without a store
  for later runs: kept if it saves at least 64 tokens, taken to be what reading one costs, until a run measures it and
    keeps it in its --store
  the window: the input is planned in 3 windows, each of at most --window-tokens 16,777,216; larger ones restore more
    of what lies far apart
"""
TUNING_REPORT = """\
2 requests: 2,000 prompt tokens, 1,400 of them unique; ideal hit rate 80.0 %; policy planned

Measured here with this model:
  prefill, a chunk of 2,048 tokens: 12,346 tokens/s
  prefill, 32 chunks of 16 tokens: 2,000 tokens/s
  prefill, 2 chunks of 64 tokens behind 1,984 restored ones: 1,500 tokens/s
  a snapshot kept in the pass: 0.250 ms
  a restore from RAM: 0.200 ms, worth 2.5 tokens; from disk: 10.500 ms, worth 129.6 tokens
  a write: 10.486 ms a MiB

 block  hit rate       cached     computed    written       read        kept      stored  live at once    seconds
    16    75.0 %        1,500          500      1,234         56     3.0 MiB     5.0 MiB            89       2.00  ##########            <- recommended
    64    20.0 %          399        1,601      1,234         56     3.0 MiB     5.0 MiB            89       4.00  ####################
   128    20.0 %          399        1,601      1,234         56     3.0 MiB     5.0 MiB            89       1.00  #####               

block 16: prefill predicted 1.50 s, measured 0.50 s (+200 %), the whole run 2.50 s; cached tokens predicted 1,500, measured 1,500: as predicted
block 64: prefill predicted 3.00 s, measured 4.00 s (-25 %), the whole run 5.00 s; cached tokens predicted 399, measured 398: NOT as predicted

note: a note
Recommended: --block-size 16 --min-gain-tokens 11
The reason. A restore from disk costs as much as computing 11 tokens.
"""  # noqa: E501


def text(lines: Any) -> str:
    return "".join(f"{line}\n" for line in lines)


def test_the_reports_are_those_of_their_numbers() -> None:
    """Fault: a number in another's place or in another unit, a column of another width, a singular for a plural."""
    config = load({"block_size": "16", "pool_size": "1999", "model": "demo"}, None, {})
    assert text(forecast_lines(SURVEY, config, 118)) == PLAN_REPORT
    assert text(tuning_lines(TUNING, config)) == TUNING_REPORT
    rows = [line for line in TUNING_REPORT.splitlines() if "#" in line]
    widest = max(map(len, TUNING_REPORT.split("Measured")[1].split("block 16")[0].splitlines()))
    for width, has_bars in ((widest, True), (widest - 1, False)):
        shown = list(tuning_lines(TUNING, config, width))
        assert [row in shown for row in rows] == [has_bars] * len(rows)
    for width in range(60, widest):
        [row] = (line for line in tuning_lines(TUNING, config, width) if line.endswith("<- recommended"))
        assert row.startswith("    16") and len(row) <= width, "the mark is on its row"


def test_what_a_snapshot_for_later_must_save_is_said() -> None:
    """Catches a number that is measured and called a guess, one that is none and not said, and words about the user's
    own."""
    config = load({"model": "demo", "block_size": "16"}, None, {})
    for given, end in (
        (
            with_measured_gain(config, 1),
            "1 token, which is what reading one costs, as a run with this --store has measured",
        ),
        (load({"model": "demo", "block_size": "16", "min_gain_tokens": "9"}, None, {}), None),
    ):
        lines = [line for line in forecast_lines(SURVEY, given) if line.startswith("  for later runs")]
        assert lines == [f"  for later runs: kept if it saves at least {end}"] * (end is not None)


def test_a_run_that_takes_no_time_has_no_bars() -> None:
    """Fault: a division by nothing where no candidate takes any time, or none was measured."""
    config = load({"model": "demo"}, None, {})
    quick = Candidate(16, NEAR["planned"], 0.0, 0.0, 0.0, Verified(0.0, 0.0, 1500))
    lines = text(tuning_lines(Tuning(FORECAST, COSTS, [quick], quick, 1, "it."), config))
    brief = Candidate(16, NEAR["planned"], 0.25, 0.0, 0.0)
    bars = text(tuning_lines(Tuning(FORECAST, COSTS, [brief, quick], brief, 2, "it."), config))
    assert bars.count("#") == 20 and "computing 2 tokens." in bars
    assert "#" not in lines and "measured 0.00 s (+0 %)" in lines and "computing 1 token." in lines


def test_the_documents_are_those_of_their_numbers() -> None:
    """Fault: a key whose number is another's."""
    config = load({"min_gain_tokens": "3", "model": "demo"}, None, {})
    near = {
        "block_size": 16, "min_gain_tokens": 3, "cached_tokens": 1500, "computed_tokens": 500, "hit_rate": 0.75,
        "snapshots_written": 1234, "snapshots_read": 56, "store_bytes": 5 << 20, "peak_live_snapshots": 89,
    }  # fmt: skip
    dataset = {"requests": 2, "prompt_tokens": 2000, "unique_tokens": 1400}
    dataset |= {"unique_tokens_is_bound": True, "ideal_is_bound": False}
    planned = forecast_document(FORECAST, "all", config, MEMORY)
    assert list(planned) == ["dataset", "policy", "model", "candidates", "memory"]
    assert planned["dataset"] == dataset | {"ideal_hit_rate": 0.8}
    assert (planned["policy"], planned["model"], planned["candidates"][0]) == ("all", "demo", near)
    tuned = tuning_document(TUNING, config)
    assert tuned["dataset"] == dataset | {"ideal_hit_rate": 0.8}
    assert tuned["candidates"][0] == near | {"predicted_prefill_s": 1.5, "measured_prefill_s": 0.5}
    assert tuned["recommended"] == {"block_size": 16, "min_gain_tokens": 11, "reason": "the reason."}
