"""What a run says of its model: that it has no chat template, and what the bundled one is worth."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from apcbatch.cli.program import main
from apcbatch.data.chat.template import NO_TEMPLATE
from apcbatch.model.locate import BUNDLED, DEMO_DIR, note_of
from tests.chats import conversation, write_lines
from tests.job.test_openai_types import batch_line


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The bundled model without its chat template."""
    folder = tmp_path / "bare"
    shutil.copytree(DEMO_DIR, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    values.pop("chat_template", None)
    path.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("first", ["chat", "completion"])
def test_a_missing_template_is_said_at_once_and_in_the_summary(apcbatch, bare, tmp_path, monkeypatch, first):
    """Fault: one warning among thousands of lines, after the weights are read; or none in what a script reads."""
    monkeypatch.setenv("FAKE_LOAD_S", "0.001")  # the engine then says "loading"
    lines = [conversation(1), batch_line("c", "/v1/completions", prompt="Once upon"), conversation(2)]
    write_lines(tmp_path / "in.jsonl", lines if first == "chat" else lines[1:])
    outcome = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--model", bare, "--max-tokens", 2, "-q")
    said = [line.removeprefix("warning: ") for line in outcome.stderr.splitlines() if line.startswith("warning: ")]
    assert said == ([NO_TEMPLATE, "loading"] if first == "chat" else ["loading", NO_TEMPLATE])
    assert outcome.code == 0 and outcome.summary["warnings"] == said


def test_completions_need_no_template(apcbatch, bare, tmp_path):
    """Fault: a run of plain completions is warned of what does not concern it."""
    write_lines(tmp_path / "in.jsonl", [batch_line(f"c{n}", "/v1/completions", prompt="Once upon") for n in range(3)])
    outcome = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--model", bare, "--max-tokens", 2)
    assert outcome.code == 0 and "template" not in outcome.stderr and outcome.summary["warnings"] == []


def test_a_model_with_a_template_is_not_warned_of(apcbatch, tmp_path):
    """Fault: the word is said of every model."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    outcome = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2)
    assert "template" not in outcome.stderr and outcome.summary["warnings"] == []


def test_doctor_warns_of_a_missing_template(bare, capsys):
    """Fault: doctor calls the plain template prefix-stable, and says nothing of what the answers will be."""
    assert main(["doctor", "--model", str(bare), "--device", "cpu"]) == 0
    [line] = [one for one in capsys.readouterr().out.splitlines() if one.split()[1] == "template"]
    assert line == f"WARN  template   {NO_TEMPLATE}"


@pytest.mark.drawn(1)
@pytest.mark.parametrize("model", BUNDLED)
def test_a_bundled_model_is_said_to_be_tiny_once(model, apcbatch, bare, tmp_path):
    """Fault: a newcomer takes the demo's answers for what the engine makes of real models; or scripts must read it."""
    write_lines(tmp_path / "in.jsonl", [conversation(1), conversation(2)])
    note = note_of(model)
    loud = apcbatch("run", "in.jsonl", "-o", "a.jsonl", "--max-tokens", 2, "--model", model)
    assert loud.stderr.splitlines().count(note) == 1 and note not in loud.stdout
    assert note not in apcbatch("run", "in.jsonl", "-o", "b.jsonl", "--max-tokens", 2, "--model", model, "-q").stderr
    assert note not in apcbatch("run", "in.jsonl", "-o", "c.jsonl", "--max-tokens", 2, "--model", bare).stderr


def test_doctor_says_what_the_demo_is(capsys):
    """Fault: doctor finds everything in order, and the answers are a toy's."""
    assert main(["doctor", "--device", "cpu"]) == 0
    [line] = [one for one in capsys.readouterr().out.splitlines() if one.split()[1] == "model"]
    assert line.startswith("ok") and line.endswith(note_of("demo"))
