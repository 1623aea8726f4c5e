"""What a run opens before its first request, what it says meanwhile, and which options exclude each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apcbatch.config import Config
from apcbatch.errors import UsageError
from apcbatch.job import opening
from tests.chats import conversation, read_records, write_lines
from tests.job.fakes import FakeEngine

RUN = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2)
GIVEN = {name: f"--{name.replace('_', '-')}" for name in ("workers", "device", "gpus", "worker_gpus", "stop_token_id")}


@pytest.fixture(autouse=True)
def chats(tmp_path: Path) -> Path:
    """An input of two conversations with two turns each."""
    return write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(2)])


def test_options_of_workers_agree() -> None:
    """Fault: an option of a cluster does nothing in silence, or one that makes sense is refused."""
    for options, refused in [
        ({}, None),
        ({"device": "cuda", "gpus": 2}, None),
        ({"workers": 2}, "--workers is for a run on a cluster; give --ray local, auto or HOST:PORT too"),
        ({"worker_gpus": 0}, "--worker-gpus is for a run on a cluster"),
        ({"ray": "local", "workers": 2}, None),
        ({"ray": "local", "device": "cuda"}, None),
        ({"ray": "local", "device": "cuda", "worker_gpus": 1}, None),
        ({"ray": "local", "device": "cuda", "worker_gpus": 0}, "--device cuda needs a GPU for each worker, and --wor"),
        ({"ray": "local", "device": "cpu", "worker_gpus": 0}, None),
        ({"ray": "local", "device": "cpu", "worker_gpus": 1}, "--device cpu uses no GPU, and --worker-gpus asks for"),
        ({"ray": "local", "worker_gpus": 0}, None),
        ({"ray": "local", "gpus": 2}, None),
        ({"ray": "local", "gpus": 2, "worker_gpus": 1}, None),
        ({"ray": "local", "gpus": 2, "worker_gpus": 0}, "--gpus 2 asks for GPUs of each worker, and --worker-gpus g"),
    ]:
        config = Config(**options, origins=GIVEN)
        if refused is None:
            opening.check_cluster(config)
        else:
            with pytest.raises(UsageError, match=f"^{refused}"):
                opening.check_cluster(config)


def test_options_of_episodes_are_for_live_ones(apcbatch: Any) -> None:
    """Fault: `--samples 5` gives one answer in silence."""
    for option, value in (("--samples", 5), ("--max-turns", 3), ("--tool-memory", "1GiB"), ("--history", "tokens")):
        done = apcbatch(*RUN, option, value)
        assert done.code == 2 and f"{option} is for live episodes; give --turns live and --tools too" in done.stderr
    assert "several answers to one prompt are n in its line" in apcbatch(*RUN, "--samples", 5).stderr


def test_a_bar_names_each_step(apcbatch: Any, tmp_path: Path) -> None:
    """Fault: nothing shows what a run waits for before its first request, or a step is named that is left out."""
    steps = ("reading the tokenizer", "reading the earlier answers", "comparing the answers", "loading demo")
    bar = ("--progress", "bar")
    assert apcbatch(*RUN, "--limit", 1).code == 0
    (tmp_path / "out.jsonl").rename(tmp_path / "old.jsonl")
    for options, shown in (
        (("-o", "a.jsonl"), (0, 3)),
        (("-o", "a.jsonl", "--resume", "--draft-from", "old.jsonl"), (0, 1, 2)),
        (("-o", "-", "--draft-from", "old.jsonl"), (0, 1, 3)),
    ):
        done = apcbatch(*RUN, *bar, *options)
        assert done.code == 0 and [steps[at] in done.stderr for at in range(4)] == [at in shown for at in range(4)]


@pytest.mark.parametrize(("many", "is_said"), [(1, True), (2, True), (3, False)])
def test_many_files_are_announced(
    apcbatch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int, is_said: bool
) -> None:
    """Fault: a run over thousands of files seems to hang, or says so of a few."""
    monkeypatch.setattr(opening, "MANY_FILES", many)
    write_lines(tmp_path / "two.jsonl", [conversation(9)])
    done = apcbatch("run", "in.jsonl", "two.jsonl", *RUN[2:])
    said = "2 files: both ends of each are read first, for --resume to compare"
    assert done.code == 0 and (said in done.stderr) == is_said


def test_a_model_that_changed_is_released(
    apcbatch: Any, engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a --resume that is refused once the weights are there keeps the store and the memory of the engine."""
    assert apcbatch(*RUN, "--limit", 1).code == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    monkeypatch.setenv("FAKE_FINGERPRINT", "e" * 64)
    done = apcbatch(*RUN, "--resume")
    assert done.code == 2 and "model_fingerprint" in done.stderr and (tmp_path / "out.jsonl").read_bytes() == before
    assert [engine.closed for engine in engines] == [True, True]


def test_an_out_without_a_line_stays(apcbatch: Any, tmp_path: Path) -> None:
    """Fault: a run without requests ends without its OUT, and what comes after it fails."""
    assert apcbatch(*RUN, "--limit", 0).code == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b"" and (tmp_path / "out.jsonl.run.json").exists()
    done = apcbatch(*RUN, "--resume")
    assert done.code == 0 and len(read_records(tmp_path / "out.jsonl")) == 4 and "already" not in done.stderr
    assert "4 requests are answered in out.jsonl already\n" in apcbatch(*RUN, "--resume").stderr
    (tmp_path / "out.jsonl").write_bytes((tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)[0])
    assert "1 request is answered in out.jsonl already\n" in apcbatch(*RUN, "--resume").stderr


def test_an_out_that_appears_while_the_model_is_read_stays(
    apcbatch: Any, engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: what another program writes to OUT while the weights are read is emptied."""
    make = opening.make_engine

    def made(*given: Any) -> Any:
        (tmp_path / "out.jsonl").write_bytes(b"theirs")
        return make(*given)

    monkeypatch.setattr(opening, "make_engine", made)
    done = apcbatch(*RUN)
    assert done.code == 2 and "out.jsonl was written to by another program while this run began" in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b"theirs" and engines[-1].closed
    assert apcbatch(*RUN, "--overwrite").code == 0


@pytest.mark.parametrize(("gpus", "place"), [(1, "cpu"), (2, "2 GPUs")])
def test_verbose_names_where_it_runs(apcbatch: Any, gpus: int, place: str) -> None:
    """Fault: -v names another device than the one that computes."""
    done = apcbatch(*RUN, "-v", "--gpus", gpus, "--block-size", 32)
    assert f"model demo, bfloat16 on {place}; block size 32, policy all, store none\n" in done.stderr, done.stderr
    assert "policy all" not in apcbatch(*RUN, "--overwrite", "--gpus", gpus).stderr


def test_names_that_sort_before_a_dash_are_files(apcbatch: Any, tmp_path: Path) -> None:
    """Fault: an OUT called +out.jsonl is standard output, which cannot be resumed."""
    (tmp_path / "in.jsonl").rename(tmp_path / "+in.jsonl")
    for options in ((), ("--resume",)):
        done = apcbatch("run", "+in.jsonl", "-o", "+out.jsonl", "--summary", "+s.json", "--max-tokens", 2, *options)
        assert done.code == 0 and "results in +out.jsonl" in done.stderr and done.summary["errors"] == 0, done.stderr
        assert len(read_records(tmp_path / "+out.jsonl")) == 4 and (tmp_path / "+s.json").exists()
    write_lines(tmp_path / "+in.jsonl", [conversation(0), "{"])
    done = apcbatch("run", "+in.jsonl", "-o", "+out.jsonl", "--overwrite")
    assert done.code == 3 and done.final_line.endswith("""to see them: grep '"error":{' +out.jsonl""")
