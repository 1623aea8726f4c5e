"""Continuing from an OUT: what is refused, what is done again, and that each request has one line."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess

import pytest

from apcbatch.data.tokenization.tokenizer import Tokenizer
from apcbatch.job.input_changes import InputChanges
from apcbatch.job.previous_answers import drop_unusable, read_answers
from apcbatch.job.sink import FileSink
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers

OPTIONS = ("--max-tokens", 3)


@pytest.fixture
def twelve(tmp_path):
    """An input of six conversations with two turns each."""
    return write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(6)])


def cut(path, lines, torn=b""):
    """Keep the first lines of OUT, and some bytes of a torn one."""
    kept = path.read_bytes().splitlines(keepends=True)[:lines]
    path.write_bytes(b"".join(kept) + torn)


def test_a_run_that_is_refused_leaves_out_as_it_was(apcbatch, twelve, tmp_path):
    """Fault: --overwrite empties OUT before the model is there; or a new OUT is left behind."""
    (tmp_path / "out.jsonl").write_text("precious\n")
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--overwrite", "--model", "./nowhere")
    assert done.code == 2 and "./nowhere" in done.stderr
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"
    assert apcbatch("run", "in.jsonl", "-o", "new.jsonl", "--model", "./nowhere").code == 2
    assert not (tmp_path / "new.jsonl").exists()


def test_overwrite_starts_again(apcbatch, twelve, tmp_path):
    """Fault: old lines stay beside the new ones, or the old run file is compared."""
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS)
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 4, "--overwrite").code == 0
    assert len(answers(read_records(tmp_path / "out.jsonl"))) == 12
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text())["config"]["max_tokens"] == 4


@pytest.mark.parametrize(("turns", "code"), [("each", 0), ("each", 3), ("rollout", 0)])
def test_a_complete_out_loads_no_weights(apcbatch, engines, twelve, tmp_path, turns, code):
    """Fault: a run that has nothing left loads weights for minutes or asks for workers; or one that has something left
    loads none."""
    if code:
        twelve.write_text(twelve.read_text() + "{\n")
    run = ("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--turns", turns)
    assert apcbatch(*run).code == code
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = apcbatch(*run, "--resume")
    assert done.code == code and len(engines) == 1 and "loading" not in done.stderr
    assert (done.summary["already_done"], done.summary["requests"]) == (12 + bool(code), 0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    cut(tmp_path / "out.jsonl", 11)
    assert apcbatch(*run, "--resume").summary["requests"] and len(engines) == 2


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        ([conversation(number) for number in range(6)], ()),
        ([conversation(number, turns=3) for number in range(5)], ("--turns", "rollout", "--max-running", 2)),
        ([{"messages": conversation(number // 4)["messages"]} for number in range(6)], ("--temperature", 1)),
    ],
    ids=["recorded turns", "rollout", "equal lines that draw"],
)
def test_resume_does_the_rest(apcbatch, tmp_path, lines, options):
    """Fault: a request is lost or doubled; a torn last line stays, or takes a whole one with it; a turn is built on the
    recorded history; equal lines are counted from the start again."""
    write_lines(tmp_path / "in.jsonl", lines)
    run = ("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, *options)
    assert apcbatch(*run).code == 0
    path = tmp_path / "out.jsonl"
    whole, records = path.read_bytes(), answers(read_records(path))
    begun, count = b'{"id":"apc-0000', len(records)
    for kept, torn in ((0, begun), (0, b"\0" * 70_000), (1, b""), (7, begun), (8, b"\0" * 70_000), (count, b"")):
        path.write_bytes(whole)
        cut(path, kept, torn)
        done = apcbatch(*run, "--resume")
        assert done.code == 0, (kept, torn[:9], done.stderr)
        assert (done.summary["requests"], done.summary["already_done"]) == (count - kept, kept)
        assert answers(read_records(path)) == records, (kept, torn[:9])


def test_out_is_rewritten_only_if_a_line_goes(apcbatch, twelve, tmp_path):
    """Fault: a large OUT is copied for nothing; or, once it is rewritten, answers are compared with the input again,
    trusted by their lines alone, or mixed with those of another rule of draws."""
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--limit", 2)
    whole, *others = read_records(tmp_path / "out.jsonl")
    failed = [{"response": None, "error": {"code": "x", "message": "x", "retryable": again}} for again in (False, True)]
    no, again = (json.dumps(record | part) for record, part in zip(others, failed, strict=False))
    texts = {"ok": json.dumps(whole), "no": no, "again": again, "torn": "\0" * 9}
    for lines, retry_errors, left in (
        ("ok no again", False, "ok no again"),
        ("ok no", True, "ok no"),
        ("ok no again", True, "ok no"),
        ("ok torn no again", False, "ok no again"),
        ("ok torn no again", True, "ok no"),
    ):
        (tmp_path / "out.jsonl").write_text("".join(texts[name] + "\n" for name in lines.split()))
        sink = FileSink(tmp_path / "out.jsonl")
        answers = read_answers(sink)
        answers.changes, answers.trusts_lines, answers.same_draw_rule = InputChanges(), False, False
        answers.changes.end()
        inode = sink.path.stat().st_ino
        found = drop_unusable(sink, answers, retry_errors)
        assert [line for _, line in sink.lines()] == [f"{texts[name]}\n".encode() for name in left.split()]
        assert (sink.path.stat().st_ino == inode) == (found is answers) == (left == lines)
        assert (len(found), found.num_torn, found.is_compared) == (len(left.split()), 0, True)
        assert not found.trusts_lines and not found.same_draw_rule
        sink.close()


def test_resume_of_a_different_run_is_refused_field_by_field(apcbatch, twelve, tmp_path, monkeypatch):
    """Fault: answers of two configurations or models end up in one file."""
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--limit", 3)
    before = (tmp_path / "out.jsonl").read_bytes()
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 4, "--seed", 1, "--resume")
    assert done.code == 2
    assert "max_tokens  then 3, now 4" in done.stderr and "seed        then 0, now 1" in done.stderr
    monkeypatch.setenv("FAKE_FINGERPRINT", "e" * 64)
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume")
    assert done.code == 2 and "model_fingerprint" in done.stderr and "max_tokens" not in done.stderr
    assert "exact" not in done.stderr
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--fast", "--resume")
    assert done.code == 2 and "exact              then True, now False" in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_an_option_that_is_not_given_is_that_of_the_earlier_run(apcbatch, twelve, tmp_path, engines, monkeypatch):
    """Fault: --resume continues with this version's default, or is refused for it; or it takes what need not be alike
    from the run file, or its value in place of a given one."""
    monkeypatch.delenv("APCBATCH_MAX_TOKENS")
    (tmp_path / "c.yaml").write_text("seed: 5\n")
    given = ("--dtype", "float32", "--temperature", 0.5, "--fast", "--stop", "q", "--config", "c.yaml", "--limit", 3)
    run = ("run", "in.jsonl", "-o", "out.jsonl")
    assert apcbatch(*run, *OPTIONS, *given, "--turns", "last", "--system-prompt", "Be brief.").code == 0
    path = tmp_path / "out.jsonl.run.json"
    facts = json.loads(path.read_text())
    facts["origins"] |= {"dtype": "default", "max_tokens": "default"}
    path.write_text(json.dumps(facts | {"version": "0.0.1"}))  # of a version with these as its defaults
    for words, field in (
        (("--dtype", "bfloat16"), "dtype  then 'float32', now 'bfloat16'"),
        (("--dtype", "auto"), "dtype  then 'float32', now 'bfloat16'"),
        (("--max-tokens", 4), "max_tokens  then 3, now 4"),
        (("--model", "demo-jamba"), "model_files"),
    ):
        refused = apcbatch(*run, *words, "--resume")
        assert refused.code == 2 and field in refused.stderr
    monkeypatch.setenv("APCBATCH_SEED", "6")
    assert "seed  then 5, now 6" in apcbatch(*run, "--resume").stderr
    monkeypatch.delenv("APCBATCH_SEED")
    shown = {line.split(":")[0]: line for line in apcbatch(*run, "--resume", "--show-config").stdout.splitlines()}
    assert shown["dtype"].split() == ["dtype:", "float32", "#", "out.jsonl.run.json:", "dtype"]
    assert shown["seed"].split() == ["seed:", "5", "#", "out.jsonl.run.json:", "seed"]
    assert shown["limit"].split() == ["limit:", "null", "#", "default"]
    assert apcbatch(*run, "--resume").code == 0 and engines[-1].dtype == "float32"
    assert len(answers(read_records(tmp_path / "out.jsonl"))) == 6
    now = json.loads(path.read_text())["config"]
    assert {name for name in now if now[name] != facts["config"][name]} == {"resume", "limit"}
    assert now["dtype"] == "float32" and now["system_prompt"] == "Be brief." and now["stop"] == ["q"]


def test_a_value_of_the_run_file_is_checked(apcbatch, twelve, tmp_path, monkeypatch):
    """Fault: a damaged run file ends in a traceback, or one of another version is refused for an option it had."""
    monkeypatch.delenv("APCBATCH_MAX_TOKENS")
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--dtype", "float32").code == 0
    path = tmp_path / "out.jsonl.run.json"
    facts = json.loads(path.read_text())
    for there, code, said in (
        ({"dtype": "float8"}, 2, "out.jsonl.run.json is 'float8'; expected one of auto, float32, bfloat16"),
        ({"max_tokens": None}, 2, "out.jsonl.run.json is null"),
        ({"dtype": "float32", "no_such_option": 1}, 0, ""),
    ):
        path.write_text(json.dumps(facts | {"config": facts["config"] | there}))
        done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--resume")
        assert done.code == code and said in done.stderr and "Traceback" not in done.stderr, there
    (tmp_path / "out.jsonl").unlink()
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume").code == 0, "nothing to continue from"


def test_what_cannot_change_an_answer_may_change_on_the_way(apcbatch, twelve, tmp_path):
    """Fault: --resume refuses another block size, batch size or verbosity."""
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--limit", 3)
    free = ("--block-size", 16, "--max-running", 2, "-q", "--policy", "last", "--ordered", "--pool-size", "1MiB")
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, *free, "--resume").code == 0
    assert [record["id"] for record in read_records(tmp_path / "out.jsonl")] == [f"apc-{n:06d}" for n in range(12)]


def test_an_out_without_its_run_file_is_refused(apcbatch, twelve, tmp_path):
    """Fault: without a run file anything may be mixed in, or a file without a newline is taken for a torn first line
    and emptied; or a damaged run file ends in a traceback."""
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS)
    path, run_file = tmp_path / "out.jsonl", tmp_path / "out.jsonl.run.json"
    for lines in (path.read_bytes(), b'{"a file": "of another program, without a newline"}'):
        for content in (None, "{", "[]", '{"config": 3, "input": {}}'):
            run_file.unlink() if content is None else run_file.write_text(content)
            path.write_bytes(lines)
            done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume")
            said = "out.jsonl.run.json" in done.stderr and "--overwrite" in done.stderr
            assert done.code == 2 and said, (lines[:9], content, done.stderr)
            assert path.read_bytes() == lines


def test_retry_errors_runs_the_retryable_ones_again(apcbatch, twelve, tmp_path, monkeypatch):
    """Fault: a retried request has two lines, or an error that cannot pass is run again."""
    write_lines(tmp_path / "in.jsonl", [*(conversation(number, turns=3) for number in range(4)), "{"])
    monkeypatch.setenv("FAKE_FAIL_ONCE", str(tmp_path / "healthy"))
    first = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS)
    assert first.code == 3 and first.final_line.endswith("--resume --retry-errors")
    failed = {record["id"] for record in read_records(tmp_path / "out.jsonl") if record["error"]}
    assert 1 < len(failed) < 13
    plain = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume")
    assert plain.code == 3 and plain.summary["requests"] == 0, "without --retry-errors the errors stay"
    (tmp_path / "healthy").touch()
    again = apcbatch(*shlex.split(first.final_line)[1:])
    assert again.code == 3 and again.summary["requests"] == len(failed) - 1
    apcbatch("run", "in.jsonl", "-o", "whole.jsonl", *OPTIONS)
    assert answers(read_records(tmp_path / "out.jsonl")) == answers(read_records(tmp_path / "whole.jsonl"))
    assert again.final_line.startswith("nothing is left to do: the error records of earlier runs would come again")
    find = again.final_line.partition("to see them: ")[2]
    seen = subprocess.run(["bash", "-c", find], cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    assert seen == [line for line in (tmp_path / "out.jsonl").read_text().splitlines() if json.loads(line)["error"]]


def test_a_stream_cannot_be_resumed(apcbatch, twelve, tmp_path):
    """Fault: --resume with `-o -` is taken for a fresh run."""
    assert apcbatch("run", "in.jsonl", "-o", "-", "--resume").code == 2
    assert apcbatch("run", "in.jsonl", "-o", "/dev/null", "--max-tokens", 1).summary["ok"] == 12


def test_lines_that_a_power_cut_tore_are_told_and_run_again(apcbatch, twelve, tmp_path):
    """Fault: requests are run a second time, and the user is not told why."""
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS)
    path = tmp_path / "out.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3], lines[5] = b"\0" * (len(lines[3]) - 1) + b"\n", b"\0" * 40 + b"\n"
    path.write_bytes(b"".join(lines))
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume")
    assert (done.code, done.summary["requests"]) == (0, 2)
    told = f"torn lines in {path}, as a kill or a power cut leaves them: 2; they are run again"
    assert done.stderr.count(told) == 1, done.stderr


def test_the_first_signal_ends_the_wait_for_a_long_text(apcbatch, tmp_path, monkeypatch):
    """Fault: the first Ctrl-C waits until a text of megabytes is tokenised, and answers it."""
    encode = Tokenizer.encode

    def press(self: Tokenizer, text: str, adds_special: bool = False):
        if "conversation 1" in text:
            signal.raise_signal(signal.SIGINT)
            self.check_stop()
        return encode(self, text, adds_special)

    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(3)])
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", press)
        stopped = apcbatch("run", "in.jsonl", "-o", "out.jsonl")
    assert stopped.code == 130 and stopped.final_line.endswith("--resume"), stopped.stderr
    resumed = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--resume")
    assert resumed.code == 0 and len(read_records(tmp_path / "out.jsonl")) == 6
