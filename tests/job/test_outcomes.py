"""What a run leaves behind: lines, error records, exit codes, the summary."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest

from apcbatch.data.chat.template import ChatTemplate
from apcbatch.errors import RequestError
from tests.chats import conversation, read_records, write_lines
from tests.effort import table
from tests.job.conftest import answers, batch_line


def test_every_turn_is_answered_once_and_the_summary_adds_up(apcbatch, engines, tmp_path):
    """Fault: a turn without a line, or a summary that counts something else than the lines say."""
    write_lines(tmp_path / "in.jsonl", [conversation(number, turns=number + 1) for number in range(3)])
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 5, "--summary", "s.json", "--block-size", 16)
    assert done.code == 0, done.stderr
    records = read_records(tmp_path / "out.jsonl")
    names = [f"c-{number}#{turn}" for number in range(3) for turn in range(1, number + 2)]
    assert sorted(record["custom_id"] for record in records) == names
    assert sorted(record["id"] for record in records) == [f"apc-{number:06d}" for number in range(6)]
    summary = done.summary
    assert json.loads((tmp_path / "s.json").read_text()) == summary
    usage = [record["response"]["body"]["usage"] for record in records]
    assert (summary["requests"], summary["ok"], summary["errors"]) == (6, 6, 0)
    assert summary["prompt_tokens"] == sum(one["prompt_tokens"] for one in usage)
    assert summary["completion_tokens"] == 30
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
    assert summary["cached_tokens"] == cached > 0
    assert len(done.lines) == 6
    assert engines[0].closed


@pytest.mark.drawn(2)
@pytest.mark.parametrize("data", ["\n", "question,answer\n1,2\n"])
@pytest.mark.parametrize("command", ["run", "plan", "show", "tune-block-size"])
def test_an_input_of_the_wrong_kind_leaves_nothing(apcbatch, tmp_path, monkeypatch, command, data):
    """Fault: a table of zeros and exit 0, an error record for each line of a small CSV, or an OUT of nothing."""
    (tmp_path / "in.jsonl").write_text(data)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data.encode())))
    for name in ("in.jsonl", "-"):
        done = apcbatch(command, name, *(["-o", "out.jsonl"] if command == "run" else []))
        assert done.code == 2 and ("is empty" in done.stderr or "comma-separated values (CSV)" in done.stderr)
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


CASE_22 = [
    (conversation(1), None),
    ("{not json", "invalid_json"),
    (conversation(1), "duplicate_id"),
    (batch_line("u") | {"url": "/v1/embeddings"}, "invalid_request"),
    (batch_line("s", messages=[{"role": "user", "content": "Hi"}], stream=True), "invalid_request"),
    (batch_line("m", messages=None, max_tokens=1), "invalid_request"),
    ({"id": "e", "messages": []}, "invalid_request"),
    ({"id": "r", "messages": [{"role": "asistant", "content": ""}]}, "invalid_request"),
    ("[1, 2]", "invalid_request"),
    ({"id": "k"}, "invalid_request"),
    (conversation(9) | {"n": 200}, "invalid_request"),
    (batch_line("f", temprature=0), "invalid_request"),
    (batch_line("long", messages=[{"role": "user", "content": "word " * 5000}]), "context_length_exceeded"),
    (batch_line("good"), None),
    (batch_line("good"), "duplicate_id"),
]  # fmt: skip


def test_each_bad_line_is_an_error_record_and_the_others_complete(apcbatch, tmp_path):
    """Fault: a bad line ends the job, disappears, or loses its number."""
    write_lines(tmp_path / "in.jsonl", [line for line, _ in CASE_22])
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--device", "cpu", "--max-tokens", 2)
    assert done.code == 3
    codes: dict[int, set] = {}
    for record in read_records(tmp_path / "out.jsonl"):
        assert (record["error"] is None) != (record["response"] is None)
        codes.setdefault(record["line"], set()).add(record["error"] and record["error"]["code"])
        if record["error"] is not None:
            assert record["error"]["line"] == record["line"] and record["error"]["retryable"] is False
            assert record["error"].keys() == {"code", "message", "line", "retryable"}
    assert codes == {number: {code} for number, (_, code) in enumerate(CASE_22, start=1)}
    assert (done.summary["ok"], done.summary["errors"]) == (3, 13)
    kinds = "1 context_length_exceeded, 2 duplicate_id, 1 invalid_json, 9 invalid_request"
    assert done.final_line.startswith(f"nothing is left to do: the error records ({kinds}) would come again")
    assert done.summary["errors_by_code"] == {
        "context_length_exceeded": 1, "duplicate_id": 2, "invalid_json": 1, "invalid_request": 9,
    }  # fmt: skip


def refuses(self, messages, tools, counts, *switches):
    return iter([RequestError("invalid_request", "the template refuses it")] * len(counts))


def breaks(*_):
    raise ZeroDivisionError("by accident")


@table("turns, fails, code, last", [
    ("each", breaks, "internal", "--resume --retry-errors"),
    ("each", refuses, "invalid_request", "nothing is left to do: the error records (2 invalid_request)"),
    ("rollout", refuses, "invalid_request", "nothing is left to do: the error records (2 invalid_request)"),
])  # fmt: skip
def test_a_conversation_that_cannot_be_rendered_has_its_own_reason(apcbatch, monkeypatch, turns, fails, code, last):
    """Fault: an exception while a prompt is made ends the job; or a conversation that the template refuses as a whole
    is an `internal` error, or loses turns."""
    texts = ChatTemplate.texts

    def fragile(self, messages, *others):
        return (fails if "conversation 1:" in messages[1]["content"] else texts)(self, messages, *others)

    monkeypatch.setattr(ChatTemplate, "texts", fragile)
    write_lines(Path("in.jsonl"), [conversation(number) for number in range(3)])
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--overwrite", "--max-tokens", 1, "--turns", turns)
    assert done.code == 3 and last in done.final_line
    errors = {one["custom_id"]: one["error"] for one in read_records(Path("out.jsonl")) if one["error"]}
    assert set(errors) == {"c-1#1", "c-1#2"}
    for error in errors.values():
        assert (error["code"], error["retryable"], error["line"]) == (code, code == "internal", 2)
        assert code == "internal" or error["message"] == "the template refuses it"


def test_strict_ends_at_the_first_error(apcbatch, tmp_path):
    """Fault: --strict continues, or what it stopped cannot be resumed."""
    write_lines(tmp_path / "in.jsonl", [conversation(1), "{", *(conversation(number) for number in range(2, 40))])
    stopped = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2, "--strict")
    assert stopped.code == 1
    assert stopped.final_line.endswith("--strict --resume")
    assert len(read_records(tmp_path / "out.jsonl")) == 1
    resumed = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2, "--strict", "--resume")
    assert resumed.code == 3
    assert len(answers(read_records(tmp_path / "out.jsonl"))) == 1 + 2 * 39


def test_strict_ends_at_errors_that_come_together(apcbatch, engines, tmp_path):
    """Fault: a second error in the pass of the first one lets the run continue; or what still ran is kept."""
    long = {"messages": [{"role": "user", "content": "word " * 5000}]}
    write_lines(tmp_path / "in.jsonl", [long, long, *(conversation(number) for number in range(40))])
    stopped = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 9, "--max-running", 3, "--strict")
    assert stopped.code == 1 and stopped.summary["errors"] == 2 and stopped.summary["ok"] < 5
    assert engines[0].num_unfinished == 0


def test_an_error_names_the_file_of_its_line(apcbatch, tmp_path):
    """Fault: of several files the one with the bad line is not named, or the place is said where there is one file."""
    for name, lines in (("a.jsonl", [conversation(1, turns=1)]), ("b.jsonl", [conversation(2, turns=1), "{"])):
        write_lines(tmp_path / name, lines)
    apcbatch("run", "a.jsonl", "b.jsonl", "-o", "out.jsonl", "--max-tokens", 1)
    apcbatch("run", "b.jsonl", "-o", "one.jsonl", "--max-tokens", 1)
    [several], [one] = (
        [record["error"] for record in read_records(tmp_path / name) if record["error"]]
        for name in ("out.jsonl", "one.jsonl")
    )
    assert (several["line"], one["line"]) == (3, 2)
    assert several["message"] == one["message"] + " (b.jsonl, line 2)"


def test_progress_is_told_while_a_run_goes_on(apcbatch, tmp_path, monkeypatch):
    """Fault: a run of hours says nothing until it ends."""
    monkeypatch.setattr("apcbatch.job.printer.PLAIN_EVERY_S", 0.0)
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(2)])
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2, "--progress", "plain")
    assert "0 of 4 requests, prompt 0 tok/s" in done.stderr and "4 of 4 requests, prompt" in done.stderr
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(lines[0])
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2, "--progress", "plain", "--resume")
    assert "3 of 3 requests, prompt" in done.stderr, "of those that this run answers"
    assert "of 4 requests" not in apcbatch("run", "in.jsonl", "-o", "-", "--progress", "none").stderr


def test_ordered_puts_lines_into_input_order(apcbatch, tmp_path):
    """Fault: --ordered leaves the order in which requests finished."""
    lines = [
        batch_line(f"b-{number}", max_tokens=9 - number, messages=conversation(number)["messages"][:2])
        for number in range(9)
    ]
    write_lines(tmp_path / "in.jsonl", [*lines, "{"])
    apcbatch("run", "in.jsonl", "-o", "free.jsonl")
    apcbatch("run", "in.jsonl", "-o", "ordered.jsonl", "--ordered")
    free, ordered = read_records(tmp_path / "free.jsonl"), read_records(tmp_path / "ordered.jsonl")
    assert [record["line"] for record in free] == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert [record["line"] for record in ordered] == list(range(1, 11))
    assert answers(free) == answers(ordered)
    piped = apcbatch("run", "in.jsonl", "-o", "-", "--ordered")
    assert [json.loads(line)["line"] for line in piped.stdout.splitlines()] == list(range(1, 11))


def test_results_on_stdout_leave_the_narration_to_stderr(apcbatch, tmp_path):
    """Fault: `-o -` mixes request lines or the summary into the results."""
    write_lines(tmp_path / "in.jsonl", [conversation(1), "{"])
    done = apcbatch("run", "in.jsonl", "-o", "-", "--max-tokens", 2)
    assert done.code == 3
    assert sorted(json.loads(line)["line"] for line in done.stdout.splitlines()) == [1, 1, 2]
    narration = done.stderr.splitlines()
    assert sum(line.startswith("c-1#") for line in narration) == 2
    assert json.loads(narration[-2])["requests"] == 3, "the summary is the last line but the command that continues"
    assert list(tmp_path.iterdir()) == [tmp_path / "in.jsonl"]


def test_an_input_that_breaks_off_is_answered_up_to_there(apcbatch, tmp_path):
    """Fault: a damaged file passes for its beginning, or takes along the lines before the cut."""
    lines = "".join(json.dumps(conversation(number, turns=1)) + "\n" for number in range(400))
    data = gzip.compress(lines.encode())
    (tmp_path / "in.jsonl.gz").write_bytes(data[: len(data) * 3 // 4])
    done = apcbatch("run", "in.jsonl.gz", "-o", "out.jsonl", "--max-tokens", 1, "-q")
    assert done.code == 3 and "in.jsonl.gz cannot be read further after line" in done.stderr
    records = sorted(read_records(tmp_path / "out.jsonl"), key=lambda record: record["line"])
    assert len(records) > 100 and [record["line"] for record in records] == list(range(1, len(records) + 1))
    assert all(record["error"] is None for record in records[:-1])
    assert records[-1]["error"]["code"] == "invalid_json"
    assert f"cannot be read further after line {len(records) - 1}" in records[-1]["error"]["message"]


@table("options, names", [
    (("--limit", 0), []),
    (("--limit", 1), ["c-1#1", "c-1#2"]),
    (("--limit", 2), ["c-1#1", "c-1#2", None]),
    (("--turns", "last"), ["c-1#2", "c-2#3", None, "x#1"]),
])  # fmt: skip
def test_options_ask_for_fewer_requests(apcbatch, options, names):
    """Fault: --limit counts requests, or 0 counts as no limit; --turns last asks for every turn; -q takes the summary
    as well as the lines of requests."""
    unanswerable = {"id": "x", "messages": [{"role": "assistant", "content": ""}]}
    write_lines(Path("in.jsonl"), [conversation(1), "{", conversation(2, turns=3), unanswerable])
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--overwrite", "--max-tokens", 1, "-q", *options)
    records = read_records(Path("out.jsonl"))
    assert sorted(map(str, names)) == sorted(str(record["custom_id"]) for record in records)
    assert (done.code, done.summary["requests"], done.lines) == (3 * (None in names), len(names), [])
    assert {record["error"]["code"] for record in records if record["custom_id"] == "x#1"} <= {"invalid_request"}


def test_no_more_is_read_than_the_engine_asks_for(apcbatch, engines, tmp_path):
    """Fault: the whole input is queued, so memory grows with it."""
    write_lines(tmp_path / "in.jsonl", [conversation(number, turns=1) for number in range(40)])
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 1, "--max-running", 4, "-q")
    assert done.summary["ok"] == 40 and engines[0].most_waiting <= 8


@pytest.mark.parametrize(
    ("lines", "options", "code"),
    [
        ([conversation(0), conversation(1)], (), 0),
        ([conversation(0), {"messages": "none"}], (), 3),
        ([conversation(0), conversation(1)], ("--max-running", 1), 130),
        ([conversation(0)], ("--turns", "rollout"), 130),
    ],
)
def test_an_interrupt_that_stops_nothing_is_no_interrupt(apcbatch, interrupt, tmp_path, lines, options, code):
    """Fault: Ctrl-C while the last requests run, which are finished, ends with 130 and a command that does nothing."""
    interrupt()
    write_lines(tmp_path / "in.jsonl", lines)
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2, *options)
    assert done.code == code, done.stderr
    assert done.final_line.startswith("apcbatch run") == (code == 130)


def test_a_stop_token_that_the_model_does_not_have_is_refused(apcbatch, engines, tmp_path):
    """Fault: every request is an error record, after the weights were read; or the model's last token is refused."""
    write_lines(tmp_path / "in.jsonl", [conversation(0)])
    run = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 1, "--stop-token-id", 0, "--stop-token-id")
    done = apcbatch(*run, 4096)
    assert done.code == 2 and not engines and not (tmp_path / "out.jsonl").exists()
    assert "--stop-token-id is 4096; the model demo has the token ids 0 to 4095" in done.stderr
    assert apcbatch(*run, 4095).code == 0
