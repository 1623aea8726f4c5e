"""Layouts, columns and a system prompt through the command line: what is shown, refused and resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from apcbatch.job.continuation import command_line
from tests.chats import read_records, write_lines

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def test_options_that_cannot_be_are_refused(apcbatch: Any, tmp_path: Path) -> None:
    """Fault: an option that does nothing is ignored in silence."""
    for options, sentence in [
        (("--messages-column", "m", "--format", "batch"), "--messages-column is for lines of the format messages"),
        (("--id-column", "m", "--format", "sharegpt"), "--id-column is for lines of the format messages"),
        (
            ("--messages-column", "m", "--prompt-column", "p"),
            "--messages-column and --prompt-column exclude each other",
        ),
        (("--system-prompt", "@none"), "--system-prompt: the file none cannot be read"),
        (("--system-prompt", "@empty"), "is empty"),
    ]:
        write_lines(tmp_path / "in.jsonl", [{"messages": CHAT}])
        (tmp_path / "empty").write_text("\n")
        for command in (("run", "in.jsonl", "-o", "out.jsonl"), ("plan", "in.jsonl"), ("show", "in.jsonl")):
            done = apcbatch(*command, *options)
            assert done.code == 2 and sentence in done.stderr and not (tmp_path / "out.jsonl").exists()


def test_a_run_shows_what_it_reads_and_resumes_only_that(apcbatch: Any, tmp_path: Path) -> None:
    """Fault: a mapping that is not shown; an OUT of two mappings, or of two system prompts under one file name."""
    write_lines(tmp_path / "in.jsonl", [{"q": "hi", "n": 1}, {"n": 2}, {"q": "ho", "n": 1}])
    (tmp_path / "sys").write_text("Be brief.\n")
    run = ("run", "in.jsonl", "-o", "out.jsonl", "--id-column", "n", "--max-tokens", 2)
    mapped = (*run, "--prompt-column", "q", "--system-prompt", "@sys")
    done = apcbatch(*mapped)
    assert done.code == 3 and 'line 1 is read as a conversation: id from "n", one user message from "q"' in done.stderr
    ids = {record["line"]: (record["custom_id"], record["error"]) for record in read_records(tmp_path / "out.jsonl")}
    assert ids[1] == ("1#1", None)
    assert ids[2][0] == "2#1" and 'the column "q" is missing' in ids[2][1]["message"]
    assert ids[3][1]["code"] == "duplicate_id"
    shown = apcbatch("show", "in.jsonl", "--id-column", "n", "--prompt-column", "q", "--system-prompt", "@sys")
    assert 'line 1 read as a conversation: id from "n", one user message from "q"' in shown.stdout
    assert "Be brief." in shown.stdout
    assert apcbatch(*mapped, "--resume").code == 3
    (tmp_path / "sys").write_text("Be long.\n")
    assert "system_prompt" in apcbatch(*mapped, "--resume").stderr
    both = "--messages-column and out.jsonl.run.json: prompt_column exclude each other"
    assert both in apcbatch(*run, "--messages-column", "q", "--resume").stderr


def test_a_text_is_continued_where_the_model_has_no_template(apcbatch: Any, bare: Path, tmp_path: Path) -> None:
    """Fault: a base model is asked in the form of a chat that it was never trained on, or without a word."""
    write_lines(tmp_path / "in.jsonl", [{"prompt": "Once upon a time", "chosen": "there"}])
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--model", bare, "--max-tokens", 2)
    assert done.code == 0 and "prompts that are texts are continued as they are" in done.stderr
    assert "plain one" not in done.stderr
    [record] = read_records(tmp_path / "out.jsonl")
    assert record["response"]["body"]["object"] == "text_completion" and record["custom_id"] == "line-1#1"
    assert "Once upon a time" in apcbatch("show", "in.jsonl", "--model", bare).stdout


def test_a_name_that_is_not_utf_8_is_shown_escaped(apcbatch: Any, tmp_path: Path) -> None:
    """Fault: one such name in a folder of inputs is an internal error, before the first request and at --resume."""
    folder = tmp_path / os.fsdecode(b"f\xe9")
    folder.mkdir()
    for name in (b"a.jsonl", b"caf\xe9.jsonl"):
        write_lines(folder / os.fsdecode(name), [{"messages": CHAT}, {"messages": []}])
    run = ("run", folder.name, "-o", "out.jsonl", "--max-tokens", 1)
    assert apcbatch(*run).code == 3
    files = [
        record["apcbatch"].get("file") for record in read_records(tmp_path / "out.jsonl") if record["error"] is None
    ]
    assert sorted(files) == ["f\\xe9/a.jsonl", "f\\xe9/caf\\xe9.jsonl"]
    assert json.loads((tmp_path / "out.jsonl.run.json").read_bytes())["input"]["name"] == "f\\xe9"
    assert apcbatch(*run, "--resume").code == 3
    assert command_line([folder.name]) == "$'f\\xe9'"


def test_columns_are_left_out_and_counted_and_lines_numbered(apcbatch: Any, tmp_path: Path) -> None:
    """Fault: a column of data under the name of a setting refuses every line, with no option to leave it out; what was
    left out is not counted; or a repeated id loses a line."""
    columns = {"id": "same", "model_a": "x", "stop": 5, "reward": 1}
    rows = [
        {"messages": CHAT, **columns},
        {"conversation": CHAT, **columns},
        {"messages": CHAT, "id": "same", "reward": None},
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    run = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 1, "--summary", "summary.json")
    refused = apcbatch(*run, "--overwrite")
    assert refused.code == 3 and "give --ignore-columns model_a" in refused.stdout
    done = apcbatch(*run, "--overwrite", "--ignore-columns", "model_a,stop")
    assert done.code == 3 and "--id-column none numbers the lines instead" in done.stdout
    done = apcbatch(*run, "--overwrite", "--ignore-columns", "model_a,stop", "--id-column", "none")
    assert done.code == 0, done.stdout
    assert [line for line in done.stderr.splitlines() if "take no part" in line] == [
        'warning: these columns take no part in the answers: "reward" (first on line 1)'
    ]
    ids = [record["custom_id"] for record in read_records(tmp_path / "out.jsonl")]
    assert sorted(ids) == ["line-1#1", "line-2#1", "line-3#1"]
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert summary["ignored_columns"] == {"reward": 2, "model_a": 2, "stop": 2}
    assert apcbatch(*run, "--resume").code == 0, "the options are those of the run file"
    assert apcbatch("show", "in.jsonl", "--line", 3, "--id-column", "none").code == 0


def test_a_chat_template_is_given_as_a_file(apcbatch: Any, tmp_path: Path) -> None:
    """Fault: a model is asked in another form than its user needs, or an OUT mixes the prompts of two templates."""
    write_lines(tmp_path / "in.jsonl", [{"messages": CHAT}])
    template = tmp_path / "t.jinja"
    template.write_text("{% for one in messages %}<{{ one.role }}> {{ one.content }}{% endfor %}")
    assert "<user> hi" in apcbatch("show", "in.jsonl", "--chat-template", "t.jinja").stdout
    run = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 1)
    assert apcbatch(*run, "--chat-template", "t.jinja").code == 0
    assert apcbatch(*run, "--resume").code == 0, "the template is that of the run file"
    template.write_text("{{ messages[0].content }}")
    assert "chat_template" in apcbatch(*run, "--resume").stderr
    for content, sentence in [(" ", "is empty"), ("{% for", "chat template"), (None, "cannot be read: No such file")]:
        template.unlink(missing_ok=True)
        if content is not None:
            template.write_text(content)
        done = apcbatch("plan", "in.jsonl", "--chat-template", "t.jinja")
        assert done.code == 2 and sentence in done.stderr, done.stderr
