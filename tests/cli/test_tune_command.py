"""`apcbatch tune-block-size` from the command line: what is refused before the slow work, and what is left behind."""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from apcbatch.cli import tune
from apcbatch.cli.program import main
from apcbatch.tuning import measurement
from tests.effort import table

CHOICE = SimpleNamespace(recommended=SimpleNamespace(block_size=96), min_gain_tokens=7, reason="it is the best.")
CHAT = '{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello"}]}\n'


@pytest.fixture(autouse=True)
def chats(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(CHAT * 3)
    monkeypatch.setattr(measurement, "measure", lambda *_: pytest.fail("the slow work was begun"))


def test_what_cannot_be_used_ends_with_2_and_a_sentence(capsys, tmp_path):
    """Fault: the work is done first, the input is overwritten, or an output is left behind by a failure."""
    for arguments, sentence in [
        ("", "Missing argument 'INPUT...'"),
        ("missing.jsonl", "missing.jsonl"),
        ("in.jsonl --candidates 1,x", "--candidates is '1,x'; expected integers from 1"),
        ("in.jsonl --candidates 8 --candidates 0", "--candidates is '8,0'; expected integers from 1"),
        ("in.jsonl --policy none", "--policy none: nothing is kept"),
        ("in.jsonl --turns rollout", "--turns rollout: its prompts are built on answers"),
        ("in.jsonl --json missing/t.json", "--json missing/t.json cannot be written"),
        ("in.jsonl --json in.jsonl", "INPUT and --json are the same file, in.jsonl"),
        ("in.jsonl --json t.txt --write t.txt", "--write and --json are the same file"),
        ("in.jsonl --write -", "only --json goes to standard output"),
        ("in.jsonl --plot t.svg", "--plot is not an option any more; nothing is drawn: leave it out"),
        ("in.jsonl --verify -1", "--verify is '-1'; expected an integer from 0 up"),
        ("- --verify 1", "- can be read once; give a file"),
        ("empty.jsonl", "empty.jsonl is empty: there is nothing to answer"),
        ("bad.jsonl", "bad.jsonl: no request can be planned, since all fail (line 1: messages is empty"),
    ]:
        (tmp_path / "empty.jsonl").write_text("")
        (tmp_path / "bad.jsonl").write_text('{"messages":[]}\n')
        before = sorted(tmp_path.iterdir())
        assert main(["tune-block-size", *arguments.split()]) == 2
        captured = capsys.readouterr()
        assert sentence in captured.err and "Traceback" not in captured.err and captured.out == ""
        assert (tmp_path / "in.jsonl").read_text() == CHAT * 3
        assert sorted(tmp_path.iterdir()) == before


def test_a_failure_leaves_no_new_file_and_keeps_an_old_one(monkeypatch, tmp_path, capsys):
    """Fault: an output that was opened early is left empty, or what it held is lost, when the work fails; or nobody
    knows what the command was at."""
    (tmp_path / "old.json").write_text("old")
    monkeypatch.setattr(measurement, "measure", Mock(side_effect=MemoryError))
    main(["tune-block-size", "in.jsonl", "--json", "old.json", "--write", "new.yaml"])
    assert (tmp_path / "old.json").read_text() == "old"
    assert not (tmp_path / "new.yaml").exists()
    assert "\nmeasuring prefill, snapshots, restores and writes\n" in f"\n{capsys.readouterr().err}"


DOCUMENT = '{\n  "a": 1\n}'


@pytest.fixture
def chosen(monkeypatch):
    """The choice is known, its table and its document are made up."""
    monkeypatch.setattr(tune, "_find", lambda *_: CHOICE)
    monkeypatch.setattr("apcbatch.tuning.text.tuning_lines", lambda *_: iter(["table"]))
    monkeypatch.setattr("apcbatch.tuning.documents.tuning_document", lambda *_: {"a": 1})


@pytest.mark.parametrize("config", [None, "base.yaml"])
def test_what_was_written_and_what_to_run_next_is_said(chosen, tmp_path, capsys, config):
    """Fault: the file is written in silence; or the command that is named does not run with the choice."""
    (tmp_path / "base.yaml").write_text("max_running: 5\n")
    given = ["--config", config] if config else []
    asked = ["tune-block-size", "in.jsonl", "--write", "t.yaml", "--limit", "2", "--window-tokens", "9"]
    assert main([*asked, *given]) == 0
    first, command = capsys.readouterr().err.splitlines()
    assert first == "wrote t.yaml (policy planned, block_size 96, min_gain_tokens 7); to run with the choice:"
    words = shlex.split(command)
    assert words[:3] == ["apcbatch", "run", "in.jsonl"] and "--limit" not in words
    assert main([*words[1:], "--show-config"]) == 0
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    expected = {"block_size": "96", "min_gain_tokens": "7", "policy": "planned", "window_tokens": "9", "limit": "null"}
    expected["max_running"] = "5" if config else "32"
    assert all([f"{name}:", value] in shown for name, value in expected.items())


def test_each_output_goes_where_it_was_asked_for(chosen, tmp_path, capsys):
    """Fault: a table stands before the JSON, `wrote -` is said, the numbers are written where the choice was asked for,
    or several inputs leave the command without an OUT."""
    for arguments, out, said in [
        ("in.jsonl", "table", []),
        ("in.jsonl --json t.json", "table", ["wrote t.json"]),
        ("in.jsonl --json -", DOCUMENT, []),
        ("in.jsonl --json t.json --write t.yaml", "table", ["wrote t.json", "wrote t.yaml (", "apcbatch run "]),
        (
            "in.jsonl --json - --write t.yaml",
            DOCUMENT,
            ["wrote t.yaml (", "apcbatch run in.jsonl -o in.answers.jsonl "],
        ),
        ("in.jsonl b.jsonl --write t.yaml", "table", ["wrote t.yaml (", "apcbatch run in.jsonl b.jsonl -o answers."]),
    ]:
        (tmp_path / "b.jsonl").write_text(CHAT)
        assert main(["tune-block-size", *arguments.split()]) == 0
        captured = capsys.readouterr()
        lines = captured.err.splitlines()
        assert captured.out == f"{out}\n" and len(lines) == len(said)
        assert all(line.startswith(words) for line, words in zip(lines, said, strict=True)), lines
        for name, held in (("t.json", DOCUMENT), ("t.yaml", "block_size: 96")):
            assert name not in arguments or held in (tmp_path / name).read_text()


@table("num_real_runs, num_run", [(0, 0), (1, 1), (5, 2)])
def test_no_more_than_the_candidates_are_run(monkeypatch, capsys, num_real_runs, num_run):
    """Fault: runs are announced that are not made, or made though --verify is 0."""
    surveyed = SimpleNamespace(footprint=None, forecast=SimpleNamespace(requests=1))
    monkeypatch.setattr(tune, "survey_with_bar", lambda *_: surveyed)
    monkeypatch.setattr(measurement, "measure", lambda *_: "measured")
    monkeypatch.setattr("apcbatch.tuning.prediction.predict", lambda *_: ["a", "b"])
    monkeypatch.setattr("apcbatch.tuning.verification.verify", lambda *given: given[2][: given[3]])
    monkeypatch.setattr("apcbatch.tuning.choice.conclude", lambda *given: given[-1])
    assert tune._find(None, SimpleNamespace(shown="in.jsonl"), {1}, num_real_runs) == ["a", "b"][: num_real_runs or 2]
    said = ["measuring prefill, snapshots, restores and writes", f"running the best {num_run} for real"]
    assert capsys.readouterr().err.splitlines() == said[: 1 + bool(num_run)]
