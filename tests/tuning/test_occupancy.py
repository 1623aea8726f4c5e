"""What the requests of an input hold at once."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apcbatch.cli.program import main
from apcbatch.config import Config
from apcbatch.cores import find_memory
from apcbatch.data.chat.known_answers import KnownAnswers
from apcbatch.data.input.inputs import find_inputs
from apcbatch.engine.memory import Use
from apcbatch.model.encoded import device_of_codes
from apcbatch.resolution import load
from apcbatch.tuning.forecast import PolicyForecast
from apcbatch.tuning.occupancy import Job, Occupancy, Peak, memory_limit, peak_of
from apcbatch.tuning.prediction import of_policies
from apcbatch.tuning.survey import RecordedAnswers, Survey, survey
from apcbatch.types import Policy, Request
from tests.chats import conversation, write_lines
from tests.effort import table

ROOT = Job(64, 64, keeps={64: 2})  # two pages; its snapshot is of the first
CHILD = Job(128, 64, 64, leader=0)  # two pages besides it
LINKS = [Job(64, 9, keeps={64: 1}), Job(128, 9, 64, leader=0, keeps={128: 1}), Job(192, 9, 128, leader=1)]


@table(
    "jobs, running, batch, peak",
    [
        ([], 4, 100, Peak()),
        ([Job(100, 9)] * 3, 4, 1000, Peak(3, 0, 6, 300)),
        ([Job(100, 9)] * 3, 2, 1000, Peak(2, 0, 4, 200)),
        # a pass takes 100 tokens, so that the answers of earlier requests end meanwhile
        ([Job(100, 1)] * 3, 4, 100, Peak(1, 0, 2, 100)),
        ([Job(250, 1)] * 2, 4, 100, Peak(2, 0, 8, 100)),
        # the root's first page lives until its last reader ends, though its answer has ended
        ([replace(ROOT, answer=1), CHILD, CHILD], 2, 1000, Peak(2, 1, 6, 128)),
        ([ROOT, CHILD, CHILD], 4, 1000, Peak(3, 1, 6, 128)),
        # a snapshot is held until its last reader's first pass, which keeps the next one
        (LINKS, 4, 1000, Peak(3, 2, 6, 64)),
        # the second and the third root overtake the child of the first
        ([LINKS[0], replace(CHILD, leader=0), LINKS[0], replace(CHILD, leader=2)], 4, 1000, Peak(4, 2, 8, 128)),
        # a snapshot for later runs stays
        ([Job(100, 1, keeps={64: 0})] * 3, 1, 100, Peak(1, 3, 2 + 2 + 2, 100)),
    ],
)
def test_requests_run_at_once(jobs: list[Job], running: int, batch: int, peak: Peak) -> None:
    """Fault: a snapshot, a slot or a page is counted too long, too briefly or twice."""
    assert peak_of(jobs, range(len(jobs)), running, batch, 0) == peak
    held = peak_of(jobs, range(len(jobs)), running, batch, held=3)
    assert held == replace(peak, snapshots=peak.snapshots + 3)


def test_no_request_is_left() -> None:
    """Fault: the simulation of a window with more requests than may wait, or in another order, does not end."""
    jobs = [Job(random.randint(2, 90), random.randint(20, 29), keeps={1: 3}) for _ in range(300)]
    jobs += [Job(95, 5, 1, leader=index % 300) for index in range(900)]
    order = sorted(range(1200), key=lambda index: (index % 300, index))
    found = peak_of(jobs, order, 8, 64, 0)
    assert (found.requests, found.pass_tokens) == (8, 64) and found.snapshots <= 8 and found.pages <= 8 * 4


def foreseen(path: Path, policy: Policy, **flags: object) -> tuple[Use, Survey, PolicyForecast]:
    """What a run of this input uses, with answers of 4 tokens."""
    config = load({"device": "cpu", "model": "demo-jamba", "block_size": "16"} | flags, None, {})
    occupancy = Occupancy(config, policy, lambda: 4)
    surveyed = survey(config, find_inputs([str(path)]), of_policies(config, {16}, occupancy), pytest.fail)
    return occupancy.use(surveyed.forecast, surveyed.footprint), surveyed, surveyed.forecast.grids[16][policy]


def test_the_snapshots_of_a_run_are_foreseen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: the snapshots live at once are those of requests one after the other, or those for later runs count
    though there is no store."""
    path = write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(6)])
    flags = {"max_tokens": "4", "max_running": "8", "draft": "none"}
    use, surveyed, own = foreseen(path, "planned", **flags)
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    common = ["--model", "demo-jamba", "--device", "cpu", "--block-size", "16", "-o", str(tmp_path / "out.jsonl")]
    assert main(["run", str(path), *common, *words, "--ignore-eos"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert use.snapshot_bytes == summary["peak_live_snapshots"] * surveyed.footprint.state_bytes
    assert use.snapshot_bytes > own.peak_live_snapshots * surveyed.footprint.state_bytes


def test_policies_without_a_plan_keep_what_fits(tmp_path: Path) -> None:
    """Fault: `all` is counted beyond the pool."""
    path = write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(6)])
    whole, surveyed, own = foreseen(path, "all")
    assert whole.snapshot_bytes == own.peak_live_snapshots * surveyed.footprint.state_bytes
    half, _, _ = foreseen(path, "all", pool_size=str(own.peak_live_bytes // 2))
    assert half.snapshot_bytes == pytest.approx(whole.snapshot_bytes / 2, abs=1)


def test_a_card_is_reckoned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: `plan --device cuda` tells of the host's memory, `auto` of it where a GPU is, or torch is loaded where
    none can be."""
    import torch

    path = str(write_lines(tmp_path / "in.jsonl", [conversation(1)]))
    monkeypatch.setattr("apcbatch.model.devices.choose_devices", lambda name, gpus: [torch.device("cuda", 0)] * gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("apcbatch.model.devices.memory_of", lambda devices: (len(devices) << 36, "", 8))
    document, common = tmp_path / "plan.json", ["--model", "demo-jamba", "--block-sizes", "64"]
    for flags, free in ((["--device", "cuda"], 64), (["--device", "cuda", "--gpus", "2"], 128)):
        assert main(["plan", path, *common, *flags, "--json", str(document)]) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Memory: ")]
        assert line.startswith("Memory: at most ") and f" of {free}.00 GiB at" in line and "kernels and graphs" in line
        memory = json.loads(document.read_text())["memory"]
        assert list(memory) == ["on", "about_bytes", "about", "at_most_bytes", "at_most", "limit_bytes"]
        assert (memory["on"], memory["limit_bytes"], memory["about"]) == ("device", free << 30, memory["at_most"])
    for module in ("tuning.occupancy", "model.encoded"):
        monkeypatch.setattr(f"apcbatch.{module}.may_have_gpu", lambda: True)
    assert (memory_limit(Config(device="auto")), device_of_codes("auto", 1)) == (64 << 30, "cuda")
    for module in ("tuning.occupancy", "model.encoded"):
        monkeypatch.setattr(f"apcbatch.{module}.may_have_gpu", lambda: False)
    assert memory_limit(Config(device="auto")) == memory_limit(Config(device="cpu")) == find_memory()
    assert device_of_codes("auto", 1) == device_of_codes("cpu", 1) == "cpu"


@table("given, mean", [({}, 3), ({"ignore_eos": True}, 99)])
def test_answers_are_as_long_as_the_recorded_ones(given: dict[str, bool], mean: int) -> None:
    """Faults: KV is counted for --max-tokens where the answers are known to be short; an answer is counted beyond the
    max_tokens of its request, or one that is not recorded as one of no tokens."""
    config, answers = Config(max_tokens=99, **given), RecordedAnswers()  # type: ignore[arg-type]
    assert answers.mean_tokens(config) == 99
    for length in (9, 2):
        recorded = [np.arange(length, dtype=np.int32)]
        answers.add(Request("r", [1, 2], max_tokens=3, references={"recorded": recorded}))
    answers.add(Request("r", [1, 2]))
    assert answers == RecordedAnswers(2, 4, 5) and answers.mean_tokens(config) == mean


@table("name, most, count", [("MOST_REQUESTS", 2, 2), ("MOST_ANSWER_TOKENS", 1, 1), ("MOST_PROMPT_TOKENS", 1, 1)])
def test_few_recorded_answers_are_tokenised(
    name: str, most: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: all answers of a large file are rendered, so that `plan` takes as long as a run."""
    monkeypatch.setattr(f"apcbatch.tuning.survey.{name}", most)
    rendered, texts = [], KnownAnswers.recorded
    monkeypatch.setattr(KnownAnswers, "recorded", lambda *given: rendered.append(given) or texts(*given))
    path = write_lines(tmp_path / "in.jsonl", [conversation(number, turns=1) for number in range(9)])
    config, answers = load({}, None, {}), RecordedAnswers()
    made = survey(config, find_inputs([str(path)]), of_policies(config, [64]), pytest.fail, answers=answers)
    assert made.num_lines == 9 and answers.requests == len(rendered) == count
