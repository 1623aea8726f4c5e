"""`--turns rollout`: each turn is built on the answers before it, also across a stop and after a failure."""

from __future__ import annotations

import pytest

from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers

OPTIONS = ("--turns", "rollout", "--max-tokens", 4)


@pytest.fixture
def chats(tmp_path):
    """Five conversations of three turns."""
    return write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(5)])


def test_turns_that_are_begun_go_before_new_conversations(apcbatch, chats, engines, tmp_path):
    """Fault: second turns wait behind the first ones of the whole input, and their states are gone."""
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--max-running", 2)
    order = [record["custom_id"] for record in read_records(tmp_path / "out.jsonl")]
    assert order.index("c-0#3") < order.index("c-2#1") and order.index("c-1#3") < order.index("c-3#1")
    assert engines[0].most_waiting <= 2


def test_the_turns_after_a_failure_fail_for_the_same_reason(apcbatch, tmp_path, monkeypatch):
    """Fault: a turn without history disappears, or is run again while the turn before it cannot be."""
    long = conversation(7, turns=4)
    long["messages"][3]["content"] = "word " * 5000
    write_lines(tmp_path / "in.jsonl", [long, conversation(8, turns=2)])
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--max-running", 1)
    assert done.code == 3 and done.final_line.startswith("nothing is left to do")
    out = tmp_path / "out.jsonl"
    turns = {one["turn"]: one for one in read_records(out) if one["apcbatch"]["conversation"] == "c-7"}
    codes = {turn: record["error"] and record["error"]["code"] for turn, record in turns.items()}
    assert codes == {1: None, **dict.fromkeys((2, 3, 4), "context_length_exceeded")}
    assert "turn 2 was not answered" in turns[4]["error"]["message"]
    whole = answers(read_records(out))
    kept = [line for line in out.read_bytes().splitlines(keepends=True) if b'"c-7#4"' not in line]
    out.write_bytes(b"".join(kept))
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume").summary["requests"] == 1
    assert answers(read_records(out)) == whole


def test_retrying_a_turn_runs_the_turns_after_it(apcbatch, chats, tmp_path, monkeypatch):
    """Fault: --retry-errors answers the failed turn and leaves those behind it as errors."""
    monkeypatch.setenv("FAKE_FAIL_ONCE", str(tmp_path / "healthy"))
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS).code == 3
    (tmp_path / "healthy").touch()
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--retry-errors").code == 0
    apcbatch("run", "in.jsonl", "-o", "whole.jsonl", *OPTIONS)
    assert answers(read_records(tmp_path / "out.jsonl")) == answers(read_records(tmp_path / "whole.jsonl"))


def test_an_interrupted_rollout_ends_with_what_runs(chats, interrupt, apcbatch, tmp_path):
    """Fault: after Ctrl-C the conversations that run are followed to their last turn."""
    out = tmp_path / "out.jsonl"
    interrupt(4)
    drained = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--max-running", 2)
    assert drained.code == 130 and 1 <= len(read_records(out)) <= 6
    apcbatch("run", "in.jsonl", "-o", "whole.jsonl", *OPTIONS)
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume").code == 0
    assert answers(read_records(out)) == answers(read_records(tmp_path / "whole.jsonl"))
