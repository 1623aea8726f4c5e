"""The protocol of live episodes, played without a model."""

from __future__ import annotations

import asyncio
import json

import pytest

from apcbatch import Tools
from apcbatch.testing import play
from apcbatch.tools import MOST_RESULT_BYTES, ToolError

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
LINE = {"messages": [{"role": "user", "content": "1 + 2?"}], "tools": TOOLS, "id": "a"}
CYCLE: dict = {}
CYCLE["self"] = CYCLE


class Adder(Tools):
    """Adds numbers; the user says one thing more."""

    def call(self, name, arguments):
        return {"sum": sum(arguments["of"])}

    def next(self, messages):
        done = sum(message["role"] == "user" for message in messages) > 1
        return None if done else {"role": "user", "content": "thanks"}

    def score(self, messages):
        return {"right": '{"sum": 3}' in [message["content"] for message in messages], "sample": self.sample}


class AsyncAdder:
    """The same by coroutines, without a base class, and with tools of its own."""

    tools = TOOLS

    async def call(self, name, arguments):
        await asyncio.sleep(0)
        return json.dumps({"sum": sum(arguments["of"])})

    async def score(self, messages):
        return {"right": True}


async def make_async(row):
    return AsyncAdder()


def returning(value):
    """A factory whose call returns a value, or raises it."""

    class Returning(Tools):
        def call(self, name, arguments):
            if isinstance(value, Exception):
                raise value
            return value

    return Returning


def test_an_episode_is_played_to_its_end():
    """Faults: a user simulator that is not asked, a sample that is not given, a result without its call's id."""
    played = play(Adder, LINE, [[("add", {"of": [1, 2]})], "3", "bye"], sample=2)
    assert [message["role"] for message in played.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert played.messages[2]["tool_call_id"] == played.messages[1]["tool_calls"][0]["id"]
    assert (played.end, played.score) == ("done", {"right": True, "sample": 2})


@pytest.mark.parametrize("factory", [make_async, lambda row: AsyncAdder()])
def test_code_may_be_async_and_need_no_base_class(factory):
    """Fault: a coroutine is taken for the result."""
    played = play(factory, {"messages": LINE["messages"]}, [[("add", {"of": [1, 2]}), ("sub", {})], "3"])
    assert [message["content"] for message in played.messages[2:4]] == [
        '{"sum": 3}',
        '{"error": "there is no tool \'sub\'", "tools": ["add"]}',
    ]
    assert (played.end, played.score) == ("done", {"right": True})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"bytes", "returned a bytes"),
        (None, "returned a NoneType"),
        ({"a": float("nan")}, "cannot be written as JSON"),
        (CYCLE, "cannot be written as JSON"),
        ({"a": b"x"}, "it holds a bytes"),
        ("\ud800", "surrogate"),
        ("x" * 10_000_001, "10,000,001 bytes"),
        (KeyError("of"), "raised KeyError: 'of'$"),
        (OSError("\udce9" + "x" * 600), r"raised OSError: \\udce9x+\.\.\. \(the first 500 of 606 characters\)$"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_a_call_may_not_return(value, reason):
    """Faults: a value that no record can hold, or that fills the memory, goes into the history; a reason that is cut
    without a word, or that no record can hold."""
    with pytest.raises(ToolError, match=reason):
        play(returning(value), LINE, [[("add", {})]])


def test_a_long_result_is_cut_between_characters():
    """Faults: megabytes go into a prompt; a character is cut in two; nothing says so."""
    with pytest.warns(UserWarning, match="the result of add is cut at 1,048,576 bytes"):
        played = play(returning("x" + "é" * MOST_RESULT_BYTES), LINE, [[("add", {})]])
    assert len(played.messages[-1]["content"].encode()) == MOST_RESULT_BYTES - 1


@pytest.mark.parametrize(
    ("said", "scored", "reason"),
    [
        (MOST_RESULT_BYTES, 0, None),
        (MOST_RESULT_BYTES + 1, 0, "next returned 1,048,577 bytes; at most 1,048,576 are taken, so shorten it"),
        (0, MOST_RESULT_BYTES, "score returned 1,048,585 bytes; at most 1,048,576 are taken, so shorten it"),
    ],
)
def test_a_long_user_message_or_score_fails(said, scored, reason):
    """Faults: a user's message is cut without a word, and the answer is to another question; a score fills OUT."""

    class Long(Adder):
        def next(self, messages):
            return {"role": "user", "content": "x" * said}

        def score(self, messages):
            return {"a": "x" * scored}

    if reason is None:
        assert play(Long, LINE, ["3"]).messages[-1]["content"] == "x" * said
    else:
        with pytest.raises(ToolError, match=reason):
            play(Long, LINE, ["3"])
