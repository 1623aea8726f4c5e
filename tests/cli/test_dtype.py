"""Each command computes in the checkpoint's own dtype, and says where its files disagree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from apcbatch.cli.program import main
from apcbatch.model.locate import DEMO_DIR
from tests.chats import conversation, write_lines


@pytest.fixture
def disagreeing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose config.json declares float32, with bfloat16 weights; beside it one line of input."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [conversation(1, turns=1)])
    shutil.copytree(DEMO_DIR, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}))
    return tmp_path / "model"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "words",
    [
        "plan in.jsonl --store s",
        "show in.jsonl",
        pytest.param("doctor", marks=pytest.mark.slow),
        pytest.param("run in.jsonl -o out.jsonl --max-tokens 1", marks=pytest.mark.slow),
        pytest.param("tune-block-size in.jsonl", marks=pytest.mark.slow),
    ],
)
def test_a_command_says_once_which_dtype_it_takes(disagreeing, capsys, words):
    """Fault: the model is computed in another dtype than its weights have, and no line, or three, say so."""
    assert main([*words.split(), "--model", "model"]) == 0
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert said.count("declares float32, and most of its weights are bfloat16") == 1, said
    assert main([*words.split(), "--model", "model", "--dtype", "float32", *["--overwrite"] * ("-o" in words)]) == 0
    captured = capsys.readouterr()
    assert "declares" not in captured.out + captured.err


def test_a_plan_needs_no_weights_for_the_dtype(disagreeing, capsys):
    """Fault: plan has the sizes of the states of another dtype than the run, or needs weights to know them."""

    def plan(*options: str) -> dict:
        assert main(["plan", "in.jsonl", "--model", "model", "--json", "-", "--policy", "all", *options]) == 0
        document = json.loads(capsys.readouterr().out)
        del document["memory"]
        return document

    own = plan()
    assert own == plan("--dtype", "float32") != plan("--dtype", "bfloat16")
    (disagreeing / "model.safetensors").unlink()
    assert plan() == own
