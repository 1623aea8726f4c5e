"""`apcbatch show`: one request as a run would make it, for people and for machines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apcbatch.cli.inspection_text import inspection_lines
from apcbatch.cli.program import main
from apcbatch.data.chat.prompt_tokens import PromptToken
from apcbatch.data.chat.render import Renderer
from apcbatch.display import cells
from apcbatch.job.inspection import Inspection, Setting, Shared
from apcbatch.model.locate import locate_model
from tests.conftest import ROOT
from tests.terminal import in_terminal

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
LINES = [
    {"messages": [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello."},
                  {"role": "user", "content": "And now?"}], "id": "a", "max_tokens": 5, "seed": 3},
    None,
    {"messages": [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello."},
                  {"role": "user", "content": "Or never? \x1b[2J東京\u202e" + "long" * 60}], "id": "b"},
    {"messages": [{"role": "asistant", "content": "Hi"}], "temperature": 7, "temprature": 1},
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5, 6, 7, 1]}},
]  # fmt: skip


@pytest.fixture(autouse=True)
def chats(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line) if line else ''}\n" for line in LINES) + "{\n")


def shown(capsys, *arguments: str, code: int = 0):
    assert main(["show", "in.jsonl", "--json", *arguments]) == code
    return json.loads(capsys.readouterr().out)


def test_the_prompt_is_the_runs(capsys, tmp_path):
    """Fault: another prompt, other settings or another origin than those of the run."""
    found = shown(capsys, "--line", "1", "--turn", "2", "--temperature", "0.5")
    source = Renderer.load(locate_model("demo")).tokenizer
    assert [token["id"] for token in found["tokens"]] == source.encode(found["text"]).ids
    assert "".join(token["text"] for token in found["tokens"]) == found["text"]
    assert found["tokens"][0] == {"id": 1, "text": "<|bos|>", "special": True}
    assert (found["turn"], found["turns"], found["custom_id"]) == (2, [1, 2], "a#2")
    settings = {one["name"]: (one["value"], one["origin"]) for one in found["settings"]}
    assert settings["max_tokens"] == (5, "line") and settings["seed"] == (3, "line")
    assert settings["temperature"] == (0.5, "--temperature") and settings["top_p"] == (1.0, "default")
    assert found["refused"] == [] and found["error_code"] is None


def test_what_is_shared_and_kept(capsys):
    """Fault: a later line counts, another request is named, or the plan cuts a shared prompt short."""
    first = shown(capsys, "--turn", "1", "--block-size", "4")
    assert first["shared"] == [] and first["resume_at"] == 0
    assert shown(capsys, "--block-size", "1", "--turn", "1")["boundaries"] == [*range(1, first["prompt_tokens"] + 1)]
    assert [kept["position"] for kept in first["kept"]] == [first["prompt_tokens"]]
    third = shown(capsys, "--line", "3", "--block-size", "4", "--policy", "all")
    assert [(one["line"], one["turn"]) for one in third["shared"]] == [(1, 1), (1, 2)]
    assert third["shared"][0]["tokens"] == first["prompt_tokens"] < third["shared"][1]["tokens"]
    assert (
        third["boundaries"]
        == [one["position"] for one in third["kept"]]
        == list(range(4, third["prompt_tokens"] + 1, 4))
    )
    last = shown(capsys, "--line", "3", "--block-size", "4", "--policy", "last")["kept"]
    assert [(one["position"], one["reason"]) for one in last] == [(third["boundaries"][-1], "the last boundary")]
    assert shown(capsys, "--line", "3", "--policy", "none")["kept"] == []


STORED = ("--store", "s", "--min-gain-tokens", "1")


def test_what_the_policy_does_with_a_request(capsys):
    """Fault: the plan of another turn is shown, or a snapshot for later runs off the grid."""
    for arguments, kept, resume_at in [
        (("--line", "1", "--turn", "1", *STORED), [(7, "read by 1")], 0),
        (("--line", "1", "--turn", "2", *STORED), [(16, "for later runs")], 7),
        (("--line", "1", "--turn", "2"), [], 7),
        (("--line", "3", "--pool-size", "0"), [], 0),
        (("--line", "3"), [], 13),
        (("--line", "1", "--policy", "last", "--block-size", "64"), [], None),
        (("--line", "1", "--policy", "last", "--block-size", "18"), [(18, "the last boundary")], None),
    ]:
        found = shown(capsys, "--block-size", "4", *arguments)
        assert [(one["position"], one["reason"]) for one in found["kept"]] == kept and found["resume_at"] == resume_at
        assert "".join(token["text"] for token in found["tokens"]) == found["text"]


@pytest.mark.slow
def test_only_the_lines_before_are_read(capsys, tmp_path):
    """Fault: a huge input is read to its end, or a line behind counts."""
    before = shown(capsys, "--line", "3")
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write(json.dumps({**LINES[2], "id": "z"}) + "\n")
    assert shown(capsys, "--line", "3") == before
    done = subprocess.run(
        f"(head -1 in.jsonl; yes '{{') | {sys.executable} -m apcbatch show - --json", shell=True, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and json.loads(done.stdout)["line"] == 1


def test_everything_that_is_refused(capsys):
    """Fault: the second fault of a line is found only after the first is mended."""
    found = shown(capsys, "--line", "4", code=3)
    assert found["error_code"] == "invalid_request" and found["tokens"] == [] and found["turn"] is None
    assert len(found["refused"]) == 3 and "asistant" in " ".join(found["refused"])
    assert shown(capsys, "--line", "6", code=3)["error_code"] == "invalid_json"
    long = shown(capsys, "--line", "1", "--max-request-tokens", "10", code=3)
    assert long["error_code"] == "context_length_exceeded" and len(long["tokens"]) > 10


def test_token_ids_have_no_text_of_their_own(capsys):
    """Fault: ids are shown as if a text had been tokenised."""
    found = shown(capsys, "--line", "5")
    assert found["text"] is None and [token["id"] for token in found["tokens"]] == [5, 6, 7, 1]


def test_what_is_not_there_ends_with_2_and_a_sentence(capsys):
    """Fault: another line is shown instead, or a traceback."""
    for arguments, sentence in [
        ("--line 2", "in.jsonl has no line 2 to look at; it is blank"),
        (
            "--line 99",
            "no line 99 to look at; it is blank, or the input ends before it; the last one before it is line",
        ),
        ("--line 99", "the last one before it is line 6"),
        ("--line 3 --limit 1", "or --limit 1 ends before it"),
        ("--limit 0", "in.jsonl has no line 1 to look at; no line before it holds anything"),
        ("--limit 0 --line 4", "in.jsonl has no line 4 to look at; no line before it holds anything"),
        ("--line 1 --turn 3", "the line has no request for turn 3; expected one of 1, 2"),
        ("--line 0", "--line is '0'; expected an integer from 1 up"),  # the last one in Python
        ("--turn last", "--turn is 'last'; expected an integer from 1 up"),
        ("--turns rollout", "--turns rollout: its prompts contain answers that are not generated yet"),
        ("--model nothing", "'nothing'"),
        *((f"--episode x --{name} 1", f"an episode in OUT; leave --{name} out") for name in ("line", "id", "turn")),
    ]:
        assert main(["show", "in.jsonl", *arguments.split()]) == 2
        captured = capsys.readouterr()
        assert sentence in captured.err and captured.out == "" and "Traceback" not in captured.err
    assert main(["show"]) == 2 and "INPUT" in capsys.readouterr().err


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_is_never_overrun_nor_commanded(columns, tmp_path):
    """Fault: a line runs over the edge, an escape of the data is obeyed, or a token or a character gets lost."""
    code, screen = in_terminal(["show", "in.jsonl", "--line", "3", "--block-size", "16"], columns, tmp_path)
    lines = ESCAPE.sub("", screen).splitlines()
    assert code == 0 and "\x1b[1m" in screen and "\x1b[2J" not in screen and "\u202e" not in screen
    assert all(cells(line) <= columns for line in lines)
    assert "\\x1b" in screen and "long" * 60 in "".join(lines).replace(" ", "")
    assert any(re.fullmatch(r"── 16\b.* ─+", line) for line in lines)


def test_a_pipe_gets_each_token_on_a_line_of_its_own(capsys):
    """Fault: scripts find tokens folded at the width of a terminal, or colours."""
    assert main(["show", "in.jsonl", "--line", "3"]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r'^ +(\d+)  (\d+)(\*?) (".*")$', out, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(len(rows))) and ("0", "1", "*", '"<|bos|>"') in rows
    assert "\x1b" not in out and "long" * 60 in out
    assert f"Boundaries: {len(rows) // 64:,} of block size 64, from 64 to {len(rows) // 64 * 64:,};" in out


def mark(text: str, *styles: str) -> str:
    return f"\x1b[{text}\x1b]" if styles == ("yellow",) else text


def found_of(*texts: str, **changes: Any) -> Inspection:
    """An inspection of tokens with these texts; those of * are special."""
    tokens = [PromptToken(number, text, text.startswith("*")) for number, text in enumerate(texts)]
    return Inspection(**({"line": 1, "model": "m", "block_size": 4, "policy": "all", "tokens": tokens} | changes))


def test_tokens_fill_a_row_to_its_last_column():
    """Fault: a row has one token less than fits, a long special token is cut with its colour, or one that fits has
    none."""
    found = found_of("*a", "b", "*c", "de", "*efghijkl", "*fghijklmn")
    rows = list(inspection_lines(found, 23, mark))[8:]
    assert rows[:6] == [
        '      0  \x1b[0* "*a"\x1b]  1 "b"', '      2  \x1b[2* "*c"\x1b]', '      3  3 "de"',
        '      4  \x1b[4* "*efghijkl"\x1b]', '      5  5* "*fghijklmn', '         "',
    ]  # fmt: skip


def test_each_request_is_named_by_what_it_has():
    """Fault: another turn or line is named, or a part that a request lacks."""
    for changes, line in [
        ({}, "line 1 (of no known format, model m)"),
        (
            {"line": 1234, "turn": 1, "turns": [1, 3], "custom_id": "a\x1b", "format": "batch"},
            "line 1,234, turn 1 of 3: a\\x1b (batch, model m)",
        ),
        ({}, "Shared: nothing, as no earlier request begins alike"),
        ({"shared": [Shared(1, 2, 3, "x")]}, "  1 token: line 2 turn 3 (x)"),
        ({"shared": [Shared(1200, 2000, None, "")]}, "  1,200 tokens: line 2,000"),
        ({"tokens": [], "refused": ["no\n", "nor this"], "error_code": "e"}, "Refused: e"),
        ({"tokens": [], "refused": ["no\n", "nor this"], "error_code": "e"}, "  nor this"),
    ]:
        assert line in inspection_lines(found_of(*"ab", **changes), None, mark)


def test_what_is_kept_is_said_up_to_eight():
    """Fault: a boundary that is kept is not named, or one too many is counted."""
    for kept, said in [
        ({}, "keeps none"),
        ({4: "a"}, "keeps 4 (a)"),
        (dict.fromkeys(range(4, 36, 4), "a"), "keeps " + ", ".join(f"{at} (a)" for at in range(4, 36, 4))),
        (dict.fromkeys(range(4, 40, 4), "a"), "32 (a) and 1 more"),
    ]:
        lines = list(inspection_lines(found_of("a", boundaries=list(range(4, 40, 4)), kept=kept), None, mark))
        assert any(line.endswith(f"policy all {said}" if said.startswith("keeps") else said) for line in lines)
    marked = list(inspection_lines(found_of(*"abcde", boundaries=[4], kept={3: "read by 2"}, resume_at=2), None, mark))
    for rule in ("── 2, the request begins here ──", "── 3, kept: read by 2 ──", "── 4 ──"):
        assert any(line.startswith(rule) for line in marked), rule


def test_a_rule_marks_each_boundary():
    """Fault: a boundary stands at another token, or its rule runs over the edge or is none."""
    for width, cells_of_rule in [(None, 20), (30, 30), (16, 16), (6, 7)]:
        lines = list(inspection_lines(found_of(*"abcde", boundaries=[2, 5]), width, mark))
        rules = [at for at, line in enumerate(lines) if re.fullmatch("── [25] ─+", line)]
        assert [lines[at].split()[1] for at in rules] == ["2", "5"]
        assert [cells(lines[at]) for at in rules] == [cells_of_rule] * 2
        if width is None or width >= 16:
            assert lines[rules[0] - 1].endswith('"b"') and lines[rules[1] - 1].endswith('"e"')


def test_settings_stand_in_columns_in_their_own_letters():
    """Fault: a stop text is shown in escapes, or the values are not below each other."""
    found = found_of("a", settings=[Setting("stop", ["\u00e9\u6771"], "line"), Setting("top_p", 1.0, "default")])
    lines = list(inspection_lines(found, None, mark))
    assert lines[-4:-2] == ['  stop   ["\u00e9\u6771"]  (line)', "  top_p  1.0  (default)"]


def test_a_terminal_of_one_column_is_taken_for_the_least_that_can_be_read():
    """Fault: a narrow pane ends in an error or in a line for each letter; or a wide one gets the rows of a pipe."""
    found = found_of("abcd", text="wxyz", reading="r", error_code=None)
    lines = [list(inspection_lines(found, width, mark)) for width in (1, 8, 200)]
    text = lines[0].index("")
    assert lines[0][:text] == lines[1][:text] != lines[2][:text] and max(map(cells, lines[0][:text])) == 8
    assert lines[0][text + 2 :][:2] == ["wx", "yz"] and "wxyz" in lines[1]
    assert lines[2][:2] == ["line 1 (of no known format, model m)", "line 1 read as a conversation: r"]


def test_the_prompt_of_a_score_is_the_prompt(capsys, monkeypatch):
    """Fault: with --score in the configuration the tokens are the recorded answer's too, and the text is not."""
    before = shown(capsys, "--turn", "1")
    monkeypatch.setenv("APCBATCH_SCORE", "1")
    assert shown(capsys, "--turn", "1") == before


def test_the_file_is_left_alone(capsys, tmp_path):
    """Fault: looking changes something."""
    before = {path: path.read_bytes() for path in Path(tmp_path).iterdir()}
    assert main(["show", "in.jsonl"]) == 0
    assert {path: path.read_bytes() for path in Path(tmp_path).iterdir()} == before


def test_a_request_is_found_by_its_id(capsys):
    """Fault: a record of OUT can only be looked at by counting lines of INPUT."""
    for id, line, turn, code in [
        ("a", 1, 2, 0),
        ("a#1", 1, 1, 0),
        ("b#2", 3, 2, 0),
        ("c", 5, 1, 0),
        ("line-4#1", 4, None, 3),
    ]:
        found = shown(capsys, "--id", id, code=code)
        assert (found["line"], found["turn"]) == (line, turn)
    assert main(["show", "in.jsonl", "--id", "d"]) == 2
    assert "in.jsonl has no line with the id 'd'" in capsys.readouterr().err
    assert main(["show", "in.jsonl", "--id", "a", "--line", "1"]) == 2
    assert "--line and --id exclude each other" in capsys.readouterr().err
