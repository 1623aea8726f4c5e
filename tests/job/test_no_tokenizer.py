"""A model folder without tokenizer files: prompts of token ids are answered, and nothing else."""

from __future__ import annotations

import json

import pytest

from apcbatch.cli.program import main
from apcbatch.data.tokenization.tokenizer import TOKENIZER_FILES
from apcbatch.model.locate import locate_model
from tests.chats import conversation, read_records, write_lines
from tests.openai_types import parsed


def completion(number, **body):
    body = {"prompt": [5, 6, 7 + number], "max_tokens": 3} | body
    return {"custom_id": f"b-{number}", "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the demo model and no tokenizer."""
    (tmp_path / "model").mkdir()
    for path in locate_model("demo").iterdir():
        if path.name in ("config.json", "generation_config.json", "model.safetensors"):
            (tmp_path / "model" / path.name).symlink_to(path)
    assert not any((tmp_path / "model" / name).exists() for name in TOKENIZER_FILES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*options):
    return main(["run", "in.jsonl", "--overwrite", "-q", "--progress", "none", "--no-store", *options])


def test_token_ids_are_answered_with_token_ids(folder, capsys):
    """Fault: ids that need no tokenizer are refused for one, or get other answers than with it."""
    write_lines(folder / "in.jsonl", [completion(1), completion(2, logprobs=2), completion(3, temperature=1, seed=3)])
    assert run("-o", "with.jsonl") == 0
    capsys.readouterr()
    assert run("-o", "out.jsonl", "--model", "model") == 0
    assert capsys.readouterr().err.count("has no tokenizer: prompts of token ids are answered with an empty text") == 1
    records, expected = read_records(folder / "out.jsonl"), read_records(folder / "with.jsonl")
    for record, other in zip(sorted(records, key=str), sorted(expected, key=str), strict=True):
        assert record["apcbatch"]["completion_token_ids"] == other["apcbatch"]["completion_token_ids"] != []
        parsed(record)
    texts = {choice["text"] for record in records for choice in record["response"]["body"]["choices"]}
    assert texts == {""}
    [likely] = [record for record in records if record["custom_id"] == "b-2"]
    tokens = likely["response"]["body"]["choices"][0]["logprobs"]["tokens"]
    assert tokens == [f"token_id:{number}" for number in likely["apcbatch"]["completion_token_ids"]]


def test_what_needs_text_is_an_error_record(folder, capsys):
    """Fault: a text, a chat or a stop text in a file of ids ends the run, or is ignored."""
    lines = [completion(1), completion(2, prompt="words"), conversation(1), completion(3, stop="x"), completion(4)]
    write_lines(folder / "in.jsonl", lines)
    assert run("-o", "out.jsonl", "--model", "model") == 3
    errors = {record["custom_id"]: record["error"] for record in read_records(folder / "out.jsonl")}
    assert errors["b-1"] is None and errors["b-4"] is None
    for name, what in (("b-2", "a text"), ("c-1#1", "a conversation"), ("b-3", "stop")):
        assert errors[name]["code"] == "invalid_request"
        assert errors[name]["message"].startswith(f"{what} needs a tokenizer, and model has none; give a prompt of tok")


def test_an_input_of_chats_is_refused_at_once(folder, capsys):
    """Fault: a tokenizer that was forgotten becomes one error record a line."""
    write_lines(folder / "in.jsonl", [conversation(1), completion(1)])
    assert run("-o", "out.jsonl", "--model", "model") == 2
    assert "model has no tokenizer; expected one of tokenizer.json, " in capsys.readouterr().err
    assert not (folder / "out.jsonl").exists()


def test_resume_and_plan_need_none_either(folder, capsys):
    """Fault: what runs cannot be resumed or planned."""
    write_lines(folder / "in.jsonl", [completion(number) for number in range(4)])
    assert run("-o", "out.jsonl", "--model", "model", "--limit", "2") == 0
    resume = ["run", "in.jsonl", "-o", "out.jsonl", "--model", "model", "--no-store", "--resume", "-q"]
    capsys.readouterr()
    assert main(resume) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["already_done"], summary["requests"]) == (2, 2)
    assert main(["plan", "in.jsonl", "--model", "model"]) == 0
