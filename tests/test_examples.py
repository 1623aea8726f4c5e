"""examples/agents.jsonl: the properties that other tests and the pages rely on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "agents.jsonl"
KINDS = ("support", "coding", "search")
MAX_BYTES = 1_500_000


@pytest.fixture(scope="module")
def conversations() -> list[dict[str, Any]]:
    """The lines of the file."""
    return [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]


def kind(conversation: dict[str, Any]) -> str:
    """support, coding or search."""
    return conversation["id"].partition("-")[0]


def test_counts_kinds_and_turns(conversations):
    """A kind that has got lost, an id used twice, a conversation that is too short or long, a huge file."""
    ids = [conversation["id"] for conversation in conversations]
    counts = Counter(map(kind, conversations))
    assert len(ids) == len(set(ids)) >= 60
    assert set(counts) == set(KINDS) and min(counts.values()) >= 20, counts
    assert {4 <= len(conversation["messages"]) <= 20 for conversation in conversations} == {True}
    assert EXAMPLES.stat().st_size < MAX_BYTES


def test_every_tool_result_answers_a_call(conversations):
    """A result without its call, a call without its result, arguments that are no JSON, an unknown tool."""
    for conversation in conversations:
        tools = {tool["function"]["name"] for tool in conversation["tools"]}
        open_calls: list[str] = []
        for message in conversation["messages"]:
            if message["role"] == "tool":
                assert message["tool_call_id"] == open_calls.pop(0), conversation["id"]
                continue
            assert not open_calls, conversation["id"]
            for call in message.get("tool_calls", []):
                assert call["type"] == "function" and call["function"]["name"] in tools
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                open_calls.append(call["id"])


def test_messages_are_well_formed(conversations):
    """A role that no input format knows, empty text where there is no call, two answers in a row."""
    for conversation in conversations:
        roles = [message["role"] for message in conversation["messages"]]
        assert roles[:2] == ["system", "user"] and set(roles) <= {"system", "user", "assistant", "tool"}
        assert ("assistant", "assistant") not in set(zip(roles, roles[1:], strict=False)), conversation["id"]
        for message in conversation["messages"]:
            assert message["content"] or message.get("tool_calls"), conversation["id"]


def test_some_answers_are_missing(conversations):
    """A file that never asks for the answer after the last message, or always does."""
    ends = Counter(conversation["messages"][-1]["role"] for conversation in conversations)
    assert ends["user"] >= 3 and ends["tool"] >= 3 and ends["assistant"] >= 30, ends


def test_support_shares_policy_and_tools(conversations):
    """A policy that differs by customer would leave nothing to reuse."""
    support = [conversation for conversation in conversations if kind(conversation) == "support"]
    starts = {json.dumps([c["messages"][0], c["tools"]]) for c in support}
    assert len(starts) == 1 and len(starts.pop()) > 8000


def test_search_forks_in_the_middle(conversations):
    """Branches that share only the system prompt, or that do not part at all."""
    search = [conversation["messages"] for conversation in conversations if kind(conversation) == "search"]
    for messages in search:
        others = [other for other in search if other is not messages and other[1] == messages[1]]
        assert len(others) == 3
        different = [[a != b for a, b in zip(messages, other, strict=False)] for other in others]
        shared = [(*row, True).index(True) for row in different]  # messages that are the same from the start
        assert min(shared) >= 6 and max(shared) < len(messages)
