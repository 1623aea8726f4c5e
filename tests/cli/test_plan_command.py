"""`apcbatch plan` from the command line: the table, the JSON, and what is refused before the work."""

from __future__ import annotations

import json

import pytest

from apcbatch.cli.program import main

CHAT = '{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello"}]}\n'


@pytest.fixture(autouse=True)
def chats(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(CHAT * 3)


def test_the_table_has_every_policy_on_every_grid(capsys):
    """Fault: a grid or a policy is missing, or the chosen block size is not among the rows."""
    assert main(["plan", "in.jsonl", "--block-sizes", "1,8", "--block-size", "5"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    head = next(number for number, row in enumerate(rows) if row[:1] == ["block"])
    table = rows[head + 1 : head + 10]
    assert [row[0] for row in table[::3]] == ["1", "5", "8"]
    [memory] = [line for line in [" ".join(row) for row in rows] if line.startswith("Memory: about 0.")]
    assert "), at most " in memory and "GiB at --max-running 32 (weights 0.01 GiB, snapshots " in memory
    assert [row[1] if len(row[0]) == 1 else row[0] for row in table] == ["all", "last", "planned"] * 3


def test_json_alone_on_standard_output(capsys):
    """Fault: the table gets into the pipe before the JSON."""
    assert main(["plan", "in.jsonl", "--json", "-", "--policy", "last"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["policy"], document["model"], document["dataset"]["requests"]) == ("last", "demo", 3)
    assert [candidate["block_size"] for candidate in document["candidates"]] == [
        1, 16, 32, 64, 128, 256, 512, 1024, 2048,
    ]  # fmt: skip


def test_what_cannot_be_used_ends_with_2_and_a_sentence(capsys, tmp_path, monkeypatch):
    """Fault: the work is done first, the input is overwritten, or a traceback is all there is."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arguments, sentence in [
        ("plan", "Missing argument 'INPUT...'"),
        ("plan missing.jsonl", "missing.jsonl"),
        ("plan in.jsonl --block-sizes 1,x", "--block-sizes is '1,x'; expected integers from 1"),
        ("plan in.jsonl --block-sizes 0", "--block-sizes is '0'; expected integers from 1"),
        ("plan in.jsonl --block-size 0", "--block-size is '0'; expected an integer from 1"),
        ("plan in.jsonl --min-gain-tokens 0", "--min-gain-tokens"),
        ("plan in.jsonl --policy none", "'none'"),
        ("plan in.jsonl --turns rollout", "--turns rollout: its prompts are built on answers"),
        ("plan in.jsonl --json missing/plan.json", "--json missing/plan.json cannot be written"),
        ("plan in.jsonl --json in.jsonl", "INPUT and --json are the same file, in.jsonl"),
        ("plan in.jsonl --samples 2", "--samples is for live episodes; give --turns live and --tools too"),
        ("plan in.jsonl --tools a.b:C", "--tools needs --turns live; give both, or neither"),
        ("show in.jsonl --threads 2", "No such option '--threads'"),
        ("plan in.jsonl --model nothing", "'nothing'"),
        ("plan in.jsonl --device cuda", "--device cuda: torch finds no CUDA device; give --device cpu"),
        ("plan in.jsonl --device cpu --gpus 2", "--gpus 2 spreads a model over GPUs, and it is to run on the CPU"),
    ]:
        assert main(arguments.split()) == 2
        captured = capsys.readouterr()
        assert sentence in captured.err and "Traceback" not in captured.err and captured.out == ""
        assert (tmp_path / "in.jsonl").read_text() == CHAT * 3


def test_a_file_in_which_every_line_fails_ends_with_2_and_the_first_reason(capsys, tmp_path):
    """Fault: a table of zeros and exit status 0, without any reason."""
    (tmp_path / "bad.jsonl").write_text('\n{"messages":[{"role":"user","content":5}]}\n' * 20)
    assert main(["plan", "bad.jsonl"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "line 2: messages[0].content is 5; expected a string" in captured.err
    (tmp_path / "bad.jsonl").write_text(CHAT)
    assert main(["plan", "bad.jsonl", "--max-request-tokens", "2"]) == 2
    assert "(line 1: " in capsys.readouterr().err
