"""`tune-block-size`: restored tokens that a run then reports, costs that add up, a choice with its reason."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from apcbatch import Engine
from apcbatch.cli.program import main
from apcbatch.data.input.inputs import find_inputs
from apcbatch.errors import UsageError
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.model.locate import locate_model
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.tree_shape import TreeShape
from apcbatch.resolution import load
from apcbatch.tuning import measurement
from apcbatch.tuning.choice import Verified, check, conclude
from apcbatch.tuning.export.documents import tuning_document, tuning_yaml
from apcbatch.tuning.export.text import tuning_lines
from apcbatch.tuning.measurement import Measurement, Rate, _fit, _Sample
from apcbatch.tuning.prediction import Workload, count_work, forecast_run, predict
from apcbatch.tuning.survey import survey
from tests.chats import conversation, read_records, write_lines
from tests.plan.plan_oracle import dataset, serve

SIZES = [1, 16, 64]
COSTS = Measurement((Rate(1, 64, 0, 1000.0),), 0.01, 0.001, 0.001, 0.0, 0.0001, 0.0002, 0.0105, 1e-8)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Four conversations of three turns that begin alike, two of them for longer."""
    lines = [conversation(number, turns=3) for number in range(4)]
    lines[3]["messages"][1] = lines[2]["messages"][1]
    return write_lines(tmp_path / "chats.jsonl", lines)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["all", "last", "planned"])
def test_restored_tokens_are_those_that_run_reports_and_a_brute_force_count_finds(
    policy: str, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: the prediction has another order, other prompts or another rule than the run."""
    config = load({"policy": policy}, None, {})
    surveyed = survey(config, find_inputs([str(chats)]), pytest.fail)
    forecast = forecast_run(config, surveyed, SIZES)
    shape = TreeShape(surveyed.tree)
    order = shape.order("auto" if policy == "planned" else "file")
    ends = surveyed.tree.end_node
    data = dataset(*[surveyed.tree.path_tokens(ends[index]).tolist() for index in range(shape.num_requests)])
    for size in SIZES:
        resume_at = forecast.grids[size][policy].resume_at
        expected = serve(data, order, size, "last" if policy == "last" else "all").resume_at
        assert dict(enumerate(resume_at)) == expected
    assert forecast.grids[1][policy].cached_tokens > forecast.grids[64][policy].cached_tokens > 0
    size, out = random.choice(SIZES), tmp_path / "out.jsonl"
    flags = ["--policy", policy, "--block-size", str(size), "--max-tokens", "1", "--max-running", "1", "-q"]
    assert main(["run", str(chats), "-o", str(out), *flags]) == 0
    records = sorted(read_records(out), key=lambda record: record["id"])
    assert [record["apcbatch"]["cached_tokens"] for record in records] == forecast.grids[size][policy].resume_at
    capsys.readouterr()


def test_the_walk_counts_every_token_once_and_waits_for_the_turn_before() -> None:
    """Fault: a request runs before what it resumes from, a budget is exceeded, or work is counted twice."""
    alone = count_work([0, 1, 2], [10, 20, 30], [0, 0, 0], [1, 2, 3], 2048, 32)
    assert alone == Workload(passes=1, chunks=3, tokens=60, context_pairs=50 + 200 + 450)
    chained = count_work([0, 1, 2], [10, 20, 30], [0, 10, 20], [1, 1, 1], 2048, 32)
    assert (chained.passes, chained.chunks, chained.tokens) == (3, 3, 30)
    narrow = count_work([0, 1, 2], [10, 20, 30], [0, 0, 0], [1, 2, 3], 8, 1)
    assert (narrow.passes, narrow.tokens) == (2 + 3 + 4, 60)


def test_costs_are_found_again_and_never_negative() -> None:
    """Fault: noise makes a cost negative, or the fit mixes up what a pass, a token and a snapshot cost."""
    shapes = [(1, 1, 64, 0, 0), (1, 1, 900, 0, 0), (1, 32, 512, 0, 0), (1, 32, 2048, 0, 0), (1, 1, 900, 0, 30)]
    true = (0.01, 0.002, 0.0005, 0.0, 0.003)
    samples = [_Sample(row, sum(a * b for a, b in zip(row, true, strict=True))) for row in shapes]
    assert _fit(samples, has_attention=False) == pytest.approx(true)
    samples[-1] = replace(samples[-1], seconds=0.3)
    assert min(_fit(samples, has_attention=False)) >= 0


def tuned(path: Path, **flags: object):
    """(configuration, survey, forecast, candidates with made-up costs)."""
    config = load(flags, None, {})
    surveyed = survey(config, find_inputs([str(path)]), pytest.fail)
    forecast = forecast_run(config, surveyed, SIZES)
    return config, surveyed, forecast, predict(config, surveyed, forecast, COSTS)


def test_what_is_written_has_its_shape_and_is_read_back(chats: Path, tmp_path: Path) -> None:
    """Fault: a key is missing or renamed, candidates do not ascend, or the YAML is refused by --config."""
    store = tmp_path / "store"
    config, surveyed, forecast, candidates = tuned(chats, store=str(store))
    assert not store.exists()
    candidates[0] = replace(candidates[0], verified=Verified(0.5, 0.6, 7))
    tuning = conclude(config, surveyed, forecast, COSTS, candidates)
    document = json.loads(json.dumps(tuning_document(tuning, config)))
    assert list(document) == ["dataset", "policy", "model", "candidates", "recommended"]
    assert [one["block_size"] for one in document["candidates"]] == SIZES
    assert ["measured_prefill_s" in one for one in document["candidates"]] == [True, False, False]
    assert all("predicted_prefill_s" in one for one in document["candidates"])
    assert list(document["recommended"]) == ["block_size", "min_gain_tokens", "reason"]
    path = tmp_path / "tuned.yaml"
    path.write_text(tuning_yaml(tuning, config))
    read = load({}, str(path), {})
    assert (read.block_size, read.policy, read.min_gain_tokens) == (1, "planned", 11)
    lines = list(tuning_lines(tuning, config))
    assert sum("<- recommended" in line for line in lines) == 1
    assert any("measured 7: NOT as predicted" in line for line in lines)


def test_what_has_nothing_to_tune_is_refused() -> None:
    """Fault: a policy that keeps nothing is measured and a block size recommended for it."""
    with pytest.raises(UsageError, match="--policy none: nothing is kept"):
        check(load({"policy": "none"}, None, {}))


@pytest.mark.slow
def test_from_the_command_line_with_a_real_run(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: the parts do not fit together, an output is left out, or the real run restores something else."""
    pytest.importorskip("matplotlib")
    names = {flag: str(tmp_path / name) for flag, name in
             (("--json", "t.json"), ("--write", "t.yaml"), ("--plot", "t.svg"))}  # fmt: skip
    flags = [part for pair in names.items() for part in pair]
    assert main(["tune-block-size", str(chats), "--candidates", "8,24", "--verify", "1", *flags]) == 0
    out = capsys.readouterr().out
    assert ": as predicted" in out and "Recommended: --block-size" in out
    document = json.loads(Path(names["--json"]).read_text())
    assert {8, 24, 64} < {one["block_size"] for one in document["candidates"]}
    assert sum("measured_prefill_s" in one for one in document["candidates"]) == 1
    assert Path(names["--plot"]).read_bytes().startswith(b"<?xml")
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
    config = load({}, None, {})
    model = load_model_config(locate_model("demo"))
    footprint = Footprint.of(state_layout(model, config.dtype))
    measured = measurement.measure(config, footprint, pytest.fail)
    assert seen["memory", False] == measurement.ROUNDS * measurement.NUM_CONTINUED
    assert seen["disk", True] == measurement.NUM_STORED
    assert min(measured.restore_ram_s, measured.restore_disk_s, measured.write_byte_s, measured.tokens_per_s) > 0
