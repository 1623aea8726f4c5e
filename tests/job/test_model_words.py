"""What a run says of its model: that it has no chat template, and what the bundled one is worth."""

from __future__ import annotations

import pytest

from apcbatch.cli.program import main
from apcbatch.data.chat.template import NO_TEMPLATE
from apcbatch.model.locate import BUNDLED, note_of
from tests.chats import conversation, write_lines
from tests.job.conftest import batch_line

CHAT, COMPLETION = conversation(1), batch_line("c", prompt="Once upon")


@pytest.mark.parametrize(
    ("lines", "has_template", "said"),
    [
        ([CHAT, COMPLETION, CHAT], False, [NO_TEMPLATE, "loading"]),
        ([COMPLETION, CHAT], False, ["loading", NO_TEMPLATE]),
        ([COMPLETION, COMPLETION], False, ["loading"]),
        ([CHAT], True, ["loading"]),
    ],
)
def test_a_missing_template_is_said_at_once_and_in_the_summary(
    apcbatch, bare, tmp_path, monkeypatch, lines, has_template, said
):
    """Fault: one warning among thousands of lines, after the weights are read; or none in what a script reads; or a
    run is warned of what does not concern it."""
    monkeypatch.setenv("FAKE_LOAD_S", "0.001")  # the engine then says "loading"
    write_lines(
        tmp_path / "in.jsonl",
        [one | {"id": str(at)} if one is CHAT else one | {"custom_id": str(at)} for at, one in enumerate(lines)],
    )
    model = () if has_template else ("--model", bare)
    outcome = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *model, "--max-tokens", 2, "-q")
    warnings = [line.removeprefix("warning: ") for line in outcome.stderr.splitlines() if line.startswith("warning: ")]
    assert outcome.code == 0 and outcome.summary["warnings"] == warnings == said


def test_doctor_says_what_the_model_is_worth(bare, capsys):
    """Fault: doctor calls the plain template prefix-stable, and says nothing of what the answers will be; or finds
    everything in order where they are a toy's."""
    for model, name, said in (
        (str(bare), "template", f"WARN  template   {NO_TEMPLATE}"),
        ("demo", "model", note_of("demo")),
    ):
        assert main(["doctor", "--model", model, "--device", "cpu"]) == 0
        [line] = [one for one in capsys.readouterr().out.splitlines() if one.split()[1] == name]
        assert line.endswith(said) and line.startswith("ok" if model == "demo" else "WARN")


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
