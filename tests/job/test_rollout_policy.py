"""`--turns rollout` under the default policy, with the real engine: what each turn starts from."""

from __future__ import annotations

import pytest

from apcbatch.cli.program import main
from tests.chats import conversation, read_records, write_lines

BLOCK = 16


@pytest.fixture
def turns(tmp_path, monkeypatch):
    """The record of each turn of three conversations that begin alike, one after the other, by custom_id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("APCBATCH_POLICY")
    write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(3)])
    options = ("--block-size", str(BLOCK), "--max-tokens", "20", "--ignore-eos", "--max-running", "1")
    assert main(["run", "in.jsonl", "-o", "out.jsonl", "-q", "--turns", "rollout", *options]) == 0
    return {record["custom_id"]: record for record in read_records(tmp_path / "out.jsonl")}


def boundary(tokens):
    return tokens // BLOCK * BLOCK


def test_a_turn_starts_from_the_answer_before(turns):
    """Fault: a rollout is planned as if its prompts were known, or the states of its answers are not kept."""
    assert len(turns) == 9
    for number in range(3):
        for turn in (2, 3):
            before = turns[f"c-{number}#{turn - 1}"]["response"]["body"]["usage"]
            reuse = turns[f"c-{number}#{turn}"]["apcbatch"]
            # The last token of an answer was never fed, so the state reached lies one token before its end.
            assert reuse["cached_tokens"] == boundary(before["total_tokens"] - 1), (number, turn)


def test_the_third_conversation_starts_where_the_first_two_part(turns):
    """Fault: the place where a prompt leaves an earlier one is not kept, so all that begin alike compute it again."""
    first, second, third = (turns[f"c-{number}#1"]["apcbatch"] for number in range(3))
    assert first["cached_tokens"] == 0
    shared = second["ideal_cached_tokens"]
    assert shared > BLOCK
    assert third["cached_tokens"] == boundary(shared)
