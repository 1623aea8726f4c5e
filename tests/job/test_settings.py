"""What a line sets for itself, through a whole run: its settings, the model that it names, its columns."""

from __future__ import annotations

from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers, batch_line

MESSAGES = [{"role": "user", "content": "Hi"}]
SHAREGPT = [{"from": "human", "value": "Hi"}]


def test_a_line_without_drafts_has_the_same_answers(apcbatch, engines, tmp_path):
    """Fault: `draft: false` is dropped on the way, or moves the draws of a line without an id, or makes the request
    another one for --resume."""
    lines = [
        {"messages": MESSAGES},
        {"conversations": SHAREGPT},
        batch_line("b"),
        batch_line("p", prompt="Hi"),
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


LINES = [
    batch_line("same", model="demo"),
    batch_line("longer", model="org/demo/"),
    batch_line("other", model="gpt-4o"),
    conversation(3, turns=1) | {"model": "gpt-4o"},
    {"id": "s", "conversations": SHAREGPT, "model": ""},
    batch_line("none", model=None),
]


def test_another_model_is_one_warning_or_refused(apcbatch, tmp_path):
    """Fault: answers of one model are taken for those of another, or each of 10,000 lines is a warning; --strict-model
    lets a line through, refuses one that names the model with its folder, or is mixed with answers in one OUT."""
    write_lines(tmp_path / "in.jsonl", LINES)
    run = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2)
    done = apcbatch(*run)
    assert done.code == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "model is" in line] == [
        'warning: line 3: model is "gpt-4o", and the model that is loaded is "demo", which answers; --strict-model '
        "refuses such requests"
    ]
    done = apcbatch(*run, "--strict-model", "--resume")
    assert done.code == 2 and "strict_model" in done.stderr
    done = apcbatch(*run, "--strict-model", "--overwrite")
    assert done.code == 3 and "which answers" not in done.stderr
    records = read_records(tmp_path / "out.jsonl")
    errors = {record["custom_id"]: record["error"] for record in records if record["error"]}
    assert errors.keys() == {"other", "c-3#1", "s#1"}
    sentence = (
        'model is "gpt-4o", and the model that is loaded is "demo"; name that one, leave model out, or run without '
        "--strict-model"
    )
    assert errors["other"] == {"code": "invalid_request", "message": sentence, "line": 3, "retryable": False}
