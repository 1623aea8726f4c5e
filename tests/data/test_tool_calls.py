"""Tool calls in answers: what is a call, and what stays text."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apcbatch.data.tool_calls import parse_answer

CALL = '<tool_call>{"name": "get", "arguments": {"q": "é", "n": 1}}</tool_call>'


def test_calls_are_taken_out_of_the_content() -> None:
    """In order, numbered, with their arguments as JSON text as OpenAI has them."""
    answer = parse_answer(f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "b", "arguments": "{{}}"}}\n</tool_call>\n')
    assert answer.content == "Let me see."
    assert [call["id"] for call in answer.tool_calls] == ["call_1", "call_2"]
    assert [call["function"]["name"] for call in answer.tool_calls] == ["get", "b"]
    assert answer.tool_calls[0] == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get", "arguments": '{"q":"é","n":1}'},
    }
    assert parse_answer('<tool_call>{"name": "b"}</tool_call>').tool_calls[0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>{}</tool_call>",
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        '{"name": "f", "arguments": {}}</tool_call>',
        "</tool_call><tool_call>",
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 400 + "1" + "}" * 400 + "}</tool_call>",
    ],
)
def test_a_malformed_block_stays_in_the_content(block: str) -> None:
    """What the model wrote is never lost; a good call beside it is still one."""
    assert (parse_answer(f" {block} ").content, parse_answer(block).tool_calls) == (f" {block} ", [])
    assert parse_answer(f"{CALL} {block}").content == block
    assert len(parse_answer(f"{CALL} {block}").tool_calls) == 1


def test_text_without_calls_is_the_content() -> None:
    """Blanks and line ends included."""
    for text in ("", " a\n", "< tool_call >"):
        assert (parse_answer(text).content, parse_answer(text).tool_calls) == (text, [])


def test_an_answer_goes_back_into_the_history() -> None:
    """Templates want the arguments as an object."""
    assert parse_answer(f"a {CALL}").as_message() == {
        "role": "assistant",
        "content": "a",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get", "arguments": {"q": "é", "n": 1}},
            }
        ],
    }
    assert parse_answer("a").as_message() == {"role": "assistant", "content": "a"}


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", CALL, '{"name": "f"}', "x", " "])).map("".join))
def test_any_text_is_an_answer(text: str) -> None:
    """Every call has a name and arguments that parse; everything else is in the content."""
    answer = parse_answer(text)
    for call in answer.tool_calls:
        assert isinstance(orjson.loads(call["function"]["arguments"]), dict)
    if not answer.tool_calls:
        assert answer.content == text


def test_many_open_markers_cost_no_square() -> None:
    """An answer of a hundred thousand openings is looked through once."""
    text = "<tool_call>" * 100_000
    assert parse_answer(text).content == text
