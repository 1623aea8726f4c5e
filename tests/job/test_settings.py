"""What a line sets for itself, through a whole run: its settings, the model that it names, its columns."""

from __future__ import annotations

import pytest

from apcbatch.config import Config
from apcbatch.job.continuation import _flag
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers

MESSAGES = [{"role": "user", "content": "Hi"}]
SHAREGPT = [{"from": "human", "value": "Hi"}]


def batch_line(custom_id, **body):
    return {
        "custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES} | body,
    }  # fmt: skip


def test_a_setting_of_a_line_wins_over_the_option(apcbatch, tmp_path):
    """Fault: `max_tokens` beside `messages` does nothing, or holds for the first turn alone."""
    lines = [
        conversation(1) | {"max_tokens": 2, "logprobs": True},
        {"id": "s", "conversations": SHAREGPT, "max_tokens": 3},
        batch_line("b", max_tokens=4),
        conversation(4, turns=1),
    ]
    write_lines(tmp_path / "in.jsonl", lines)
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 5)
    assert done.code == 0, done.stderr
    found = {
        record["custom_id"]: (
            record["response"]["body"]["usage"]["completion_tokens"],
            record["response"]["body"]["choices"][0]["logprobs"] is not None,
        )
        for record in read_records(tmp_path / "out.jsonl")
    }
    assert found == {"c-1#1": (2, True), "c-1#2": (2, True), "s#1": (3, False), "b": (4, False), "c-4#1": (5, False)}


def test_a_line_without_drafts_has_the_same_answers(apcbatch, engines, tmp_path):
    """Fault: `draft: false` is dropped on the way, or moves the draws of a line without an id, or makes the request
    another one for --resume."""
    lines = [
        {"messages": MESSAGES},
        {"conversations": SHAREGPT},
        batch_line("b"),
        {"custom_id": "p", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}},
    ]
    runs = []
    for draft in ({}, {"draft": True}, {"draft": False}):
        given = [line | {"body": line["body"] | draft} if "body" in line else line | draft for line in lines]
        write_lines(tmp_path / "in.jsonl", given)
        done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--temperature", 1, "--max-tokens", 4, "--overwrite")
        assert done.code == 0, done.stderr
        assert [request.draft for request in engines[-1].submitted] == [draft.get("draft", True)] * len(lines)
        records = read_records(tmp_path / "out.jsonl")
        runs.append((answers(records), [record["apcbatch"]["request_digest"] for record in records]))
        assert all(record["apcbatch"]["drafted_tokens"] == 0 for record in records)
    assert runs[0] == runs[1] == runs[2]


def test_a_refused_field_is_one_error_record_with_its_line(apcbatch, tmp_path):
    """Fault: `n` and `response_format` beside `messages` do nothing, or one such line ends the job."""
    lines = [
        conversation(1, turns=1),
        conversation(2) | {"n": 200},
        {"id": "s", "conversations": SHAREGPT, "response_format": {"type": "xml"}},
        batch_line("b", temprature=0),
    ]
    write_lines(tmp_path / "in.jsonl", lines)
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2).code == 3
    records = sorted(read_records(tmp_path / "out.jsonl"), key=lambda record: record["line"])
    assert [record["error"] and record["error"]["code"] for record in records] == [None] + ["invalid_request"] * 3
    assert [record["line"] for record in records] == [1, 2, 3, 4]
    assert [record["error"]["message"] for record in records[1:]] == [
        "n is 200; expected an integer from 1 to 128",
        'response_format.type is "xml"; expected text, json_object or json_schema',
        'body has the unknown field "temprature"; did you mean temperature?',
    ]


LINES = [
    batch_line("same", model="demo"),
    batch_line("longer", model="org/demo/"),
    batch_line("other", model="gpt-4o"),
    conversation(3, turns=1) | {"model": "gpt-4o"},
    {"id": "s", "conversations": SHAREGPT, "model": ""},
    batch_line("none", model=None),
]


def test_another_model_is_one_warning(apcbatch, tmp_path):
    """Fault: answers of one model are taken for those of another, or each of 10,000 lines is a warning."""
    write_lines(tmp_path / "in.jsonl", LINES)
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2)
    assert done.code == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "model is" in line]
    assert warnings == [
        'warning: line 3: model is "gpt-4o", and the model that is loaded is "demo", which answers; --strict-model '
        "refuses such requests"
    ]


def test_another_model_is_refused_if_asked(apcbatch, tmp_path):
    """Fault: --strict-model lets a line through, or refuses one that names the model with its folder."""
    write_lines(tmp_path / "in.jsonl", LINES)
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2, "--strict-model")
    assert done.code == 3 and "which answers" not in done.stderr
    errors = {record["custom_id"]: record["error"] for record in read_records(tmp_path / "out.jsonl")}
    assert {name for name, error in errors.items() if error} == {"other", "c-3#1", "s#1"}
    assert errors["other"] == {
        "code": "invalid_request",
        "message": 'model is "gpt-4o", and the model that is loaded is "demo"; name that one, leave model out, or run '
        "without --strict-model",
        "line": 3,
        "retryable": False,
    }


def test_a_run_is_not_resumed_with_another_strictness(apcbatch, tmp_path):
    """Fault: one OUT holds answers and refusals for the same kind of line."""
    write_lines(tmp_path / "in.jsonl", LINES)
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2)
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2, "--strict-model", "--resume")
    assert done.code == 2 and "strict_model" in done.stderr


@pytest.mark.parametrize("format", ["auto", "messages"])
def test_columns_are_a_warning_and_change_nothing(apcbatch, tmp_path, format):
    """Fault: a dataset's columns are dropped in silence, or change an answer."""
    plain = [conversation(number) for number in range(3)]
    write_lines(tmp_path / "plain.jsonl", plain)
    write_lines(tmp_path / "rich.jsonl", [line | {"reward": 1, "prompt": "x"} for line in plain])
    without = apcbatch("run", "plain.jsonl", "-o", "a.jsonl", "--max-tokens", 2)
    rich = apcbatch("run", "rich.jsonl", "-o", "b.jsonl", "--max-tokens", 2, "--format", format)
    assert (without.code, rich.code) == (0, 0) and "columns" not in without.stderr
    sentence = 'warning: these columns take no part in the answers: "reward", "prompt" (first on line 1)'
    assert rich.stderr.splitlines().count(sentence) == 1 and rich.stderr.count("columns") == 1
    assert answers(read_records(tmp_path / "a.jsonl")) == answers(read_records(tmp_path / "b.jsonl"))


def test_an_option_that_is_not_set_is_not_repeated():
    """Fault: the command that continues a run turns the store off because another option has no value."""
    assert list(_flag("store", Config(store=None))) == ["--no-store"]
    assert list(_flag("limit", Config(limit=None))) == []
    assert list(_flag("store", Config(store="s"))) == ["--store", "s"]
