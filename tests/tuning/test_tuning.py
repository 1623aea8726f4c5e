"""`tune-block-size`: restored tokens that a run then reports, costs that add up, a choice with its reason."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apcbatch import Engine
from apcbatch.cli.program import main
from apcbatch.config import Config
from apcbatch.data.input.inputs import find_inputs
from apcbatch.engine.serving import LOOK_AHEAD
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.model.locate import locate_model
from apcbatch.plan.footprint import Footprint
from apcbatch.resolution import load
from apcbatch.tuning import measurement, verification
from apcbatch.tuning.choice import Candidate, Verified, conclude
from apcbatch.tuning.documents import tuning_document, tuning_yaml
from apcbatch.tuning.forecast import PolicyForecast, Served
from apcbatch.tuning.measurement import Measurement, Rate, _fit
from apcbatch.tuning.prediction import PassCounter, Passes, Workload, of_policies, of_run, predict
from apcbatch.tuning.survey import survey
from apcbatch.tuning.text import tuning_lines
from tests.chats import conversation, write_lines
from tests.effort import table

SIZES = [1, 16, 64]
COSTS = Measurement((Rate(1, 64, 0, 1000.0),), 0.01, 0.001, 0.001, 0.0, 0.0001, 0.0002, 0.0105, 1e-8)
TABLE = PolicyForecast("planned", 200, 60, 3, 1, 2, 100, 0, 1, 0, 0)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Four conversations of three turns that begin alike, two of them for longer."""
    lines = [conversation(number, turns=3) for number in range(4)]
    lines[3]["messages"][1] = lines[2]["messages"][1]
    return write_lines(tmp_path / "chats.jsonl", lines)


def count_work(
    order: Iterable[int], lengths: list[int], resume_at: list[int], conversations: list[int], tokens: int, running: int
) -> Workload:
    """The work of these requests, in this order."""
    counter = PassCounter(tokens, running)
    for index in order:
        counter.add(Served(index, conversations[index], lengths[index], resume_at[index], 0))
    return counter.finish()


def test_the_walk_counts_every_token_once_and_waits_for_the_turn_before() -> None:
    """Fault: a request runs before what it resumes from, a budget is exceeded, or work is counted twice."""
    alone = count_work([0, 1, 2], [10, 20, 30], [0, 0, 0], [1, 2, 3], 2048, 32)
    assert alone == Workload(passes=1, chunks=3, tokens=60, context_pairs=50 + 200 + 450, restores=0)
    chained = count_work([0, 1, 2], [10, 20, 30], [0, 10, 20], [1, 1, 1], 2048, 32)
    assert chained == Workload(passes=3, chunks=3, tokens=30, context_pairs=50 + 150 + 250, restores=2)
    narrow = count_work([0, 1, 2], [10, 20, 30], [0, 0, 0], [1, 2, 3], 8, 1)
    assert (narrow.passes, narrow.chunks, narrow.tokens) == (2 + 3 + 4, 2 + 3 + 4, 60)


def test_the_walk_at_its_bounds() -> None:
    """Fault: a chunk of one token or of none is counted wrong, a slot is left empty or given twice, or a request waits
    for another that it does not resume from."""
    for order, lengths, resume_at, conversations, budget, running, passes, chunks in [
        ([0], [9], [0], [1], 8, 1, 2, 2),  # the second chunk is one token
        ([0], [8], [0], [1], 8, 1, 1, 1),
        ([0, 1, 2], [4, 4, 8], [0, 0, 0], [1, 2, 3], 8, 3, 2, 3),  # no token is left for the third
        ([0, 1, 2], [1, 1, 1], [0, 0, 0], [1, 2, 3], 8, 2, 2, 3),
        ([0, 1], [8, 16], [0, 0], [1, 1], 24, 2, 1, 2),  # the second turn restores nothing, so it need not wait
        ([0, 1], [8, 16], [0, 8], [1, 2], 24, 2, 1, 2),  # the first turn of its conversation waits for none
        ([1, 0], [8, 16], [0, 8], [1, 1], 24, 2, 1, 2),  # nor one that comes before what it could resume from
        ([0, 1], [8, 16], [0, 1], [1, 1], 24, 2, 2, 2),
    ]:
        work = count_work(order, lengths, resume_at, conversations, budget, running)
        assert (work.passes, work.chunks) == (passes, chunks)
        assert work.tokens == sum(lengths) - sum(resume_at)


@table("beyond, more_passes", [(-1, 3), (0, 2)])
def test_the_walk_sees_as_far_as_the_engine_does(beyond: int, more_passes: int) -> None:
    """Fault: a request enters sooner or later than the engine's queue has room for it, by one."""
    turns = LOOK_AHEAD * 2 + beyond  # behind the first, each waits for the turn before it; then one that could begin
    lengths, resume_at = [15, *range(16, 16 + turns), 15], [0, *range(15, 15 + turns), 0]
    work = count_work(range(turns + 2), lengths, resume_at, [1] * (turns + 1) + [2], 10, 2)
    assert work.passes == turns + more_passes


def test_costs_are_found_again_and_never_negative() -> None:
    """Fault: noise makes a cost negative, or the fit mixes up what a pass, a token and a snapshot cost."""
    shapes = [(1, 1, 64, 0, 0), (1, 1, 900, 0, 0), (1, 32, 512, 0, 0), (1, 32, 2048, 0, 0), (1, 1, 900, 0, 30)]
    true = (0.01, 0.002, 0.0005, 0.0, 0.003)
    samples = [(row, sum(a * b for a, b in zip(row, true, strict=True))) for row in shapes]
    assert _fit(samples, has_attention=False) == pytest.approx(true)
    samples[-1] = samples[-1][0], 0.3
    assert min(_fit(samples, has_attention=False)) >= 0


def test_what_is_written_has_its_shape_and_is_read_back(chats: Path, tmp_path: Path) -> None:
    """Fault: a key is missing or renamed, candidates do not ascend, or the YAML is refused by --config."""
    store = tmp_path / "store"
    config = load({"store": str(store)}, None, {})
    passes = Passes(config)
    forecast = survey(config, find_inputs([str(chats)]), of_run(config, SIZES, passes), pytest.fail).forecast
    candidates = predict(config, forecast, passes, COSTS)
    assert not store.exists()
    candidates[0] = replace(candidates[0], verified=Verified(0.5, 0.6, 7))
    tuning = conclude(config, forecast, COSTS, candidates)
    document = json.loads(json.dumps(tuning_document(tuning, config)))
    assert list(document) == ["dataset", "policy", "model", "candidates", "recommended"]
    assert [one["block_size"] for one in document["candidates"]] == SIZES
    assert ["measured_prefill_s" in one for one in document["candidates"]] == [True, False, False]
    assert all("predicted_prefill_s" in one for one in document["candidates"])
    assert list(document["recommended"]) == ["block_size", "min_gain_tokens", "reason"]
    path = tmp_path / "tuned.yaml"
    path.write_text(tuning_yaml(tuning, config))
    assert path.read_text() == f"# {tuning.reason}\npolicy: planned\nblock_size: 1\nmin_gain_tokens: 11\n"
    read = load({}, str(path), {})
    assert (read.block_size, read.policy, read.min_gain_tokens) == (1, "planned", 11)
    lines = list(tuning_lines(tuning, config))
    assert sum("<- recommended" in line for line in lines) == 1
    assert any("measured 7: NOT as predicted" in line for line in lines)


def test_each_line_with_a_request_advances_once(tmp_path: Path) -> None:
    """Fault: the progress stands still, or moves for each turn or for a line that has no request."""
    lines = [conversation(1, turns=3), {"messages": 3}, conversation(2, turns=2)]
    advanced: list[int] = []
    path = write_lines(tmp_path / "in.jsonl", lines)
    config = load({}, None, {})
    made = of_policies(config, SIZES)
    found = survey(config, find_inputs([str(path)]), made, pytest.fail, lambda: advanced.append(1))
    assert (len(advanced), found.num_lines, found.forecast.num_windows, found.errors.total()) == (2, 2, 1, 1)


def test_the_fastest_are_verified_in_their_places(monkeypatch: Any) -> None:
    """Fault: slow candidates are run in place of the fastest, or the candidates change their order."""
    for count, expected in [(0, []), (1, [8]), (2, [8, 32]), (9, [8, 16, 32])]:
        monkeypatch.setattr(verification, "real_run", lambda config, inputs, size, warn: Verified(size, 2.0 * size, 3))
        made = [
            Candidate(size, TABLE, *seconds) for size, seconds in ((8, (1, 1, 1)), (16, (2, 2, 2)), (32, (5, 0, 0)))
        ]
        found = verification.verify(load({}, None, {}), find_inputs([]), made, count, pytest.fail)
        assert [one.block_size for one in found] == [8, 16, 32]
        assert [one.verified and one.verified.prefill_s for one in found] == [
            size if size in expected else None for size in (8, 16, 32)
        ]


@table("store", [None, "states"])
def test_a_real_run_is_one_token_each_and_keeps_what_the_run_would(store: str | None, monkeypatch: Any) -> None:
    """Fault: a real run generates whole answers, has another block size, or a store that the run would not have."""
    made: list[tuple[int, int, bool]] = []

    def opens(config: Config, warn: Any, *, has_store: bool) -> None:
        made.append((config.block_size, config.max_tokens, has_store))
        raise ConnectionAbortedError

    monkeypatch.setattr(verification, "temporary_engine", opens)
    config = load({"store": store} if store else {}, None, {})
    with pytest.raises(ConnectionAbortedError):
        verification.real_run(config, find_inputs([]), 24, pytest.fail)
    assert made == [(24, 1, store is not None)]


@pytest.mark.slow
def test_from_the_command_line_with_a_real_run(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: the parts do not fit together, an output is left out, or the real run restores something else."""
    names = {"--json": str(tmp_path / "t.json"), "--write": str(tmp_path / "t.yaml")}
    flags = [part for pair in names.items() for part in pair]
    assert main(["tune-block-size", str(chats), "--candidates", "8,24", "--verify", "1", *flags]) == 0
    out = capsys.readouterr().out
    assert ": as predicted" in out and "Recommended: --block-size" in out
    document = json.loads(Path(names["--json"]).read_text())
    assert {8, 24, 64} < {one["block_size"] for one in document["candidates"]}
    assert sum("measured_prefill_s" in one for one in document["candidates"]) == 1
    assert "block_size:" in Path(names["--write"]).read_text()


@pytest.mark.slow
def test_each_restore_is_measured_where_it_is_said_to_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the restore from disk is measured on snapshots that are still in RAM, or that found no room beside those
    that other measurements keep."""
    seen: dict[tuple[str, bool], int] = {}
    real = Engine.run

    def run(engine: Engine, requests):
        for result in real(engine, requests):
            source = (result.cached_from, result.cached_tokens == result.prompt_tokens - 1)
            seen[source] = seen.get(source, 0) + 1
            yield result

    monkeypatch.setattr(Engine, "run", run)
    monkeypatch.setattr(measurement, "LONG", 128)
    monkeypatch.setattr(measurement, "SHORT", 2)
    config = load({"dtype": "bfloat16"}, None, {})
    model = load_model_config(locate_model("demo"))
    footprint = Footprint.of(state_layout(model, config.dtype))
    measured = measurement.measure(config, footprint, pytest.fail)
    assert seen["memory", False] == measurement.ROUNDS * measurement.NUM_CONTINUED
    assert seen["disk", True] == measurement.NUM_STORED
    assert min(measured.restore_ram_s, measured.restore_disk_s, measured.write_byte_s, measured.tokens_per_s) > 0
