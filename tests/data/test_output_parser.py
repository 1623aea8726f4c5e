"""Answers taken apart: reasoning, content, tool calls with their ids, and words about what is odd."""

from __future__ import annotations

import random
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from apcbatch.data.output.call_ids import call_ids, recorded_ids
from apcbatch.data.output.parser import OutputParser
from apcbatch.data.output.reasoning import PARSERS, Thought, choose_reasoning_parser
from apcbatch.data.output.tool_parser import Call
from apcbatch.data.output.tool_parsers import tool_parsers
from apcbatch.formats import REASONING_PARSERS
from tests.effort import table

TOOLS = [{"type": "function", "function": {"name": "get"}}]
CALL = '<tool_call>{"name": "get", "arguments": {"q": "é", "n": 1}}</tool_call>'
THINK = PARSERS["think"]


def output_parser(**keys: Any) -> OutputParser:
    """An output parser with tools and both parsers."""
    return OutputParser(**{"tool_parser": tool_parsers()["hermes"], "tools": TOOLS, "reasoning_parser": THINK} | keys)


def test_an_answer_as_openai_gives_it() -> None:
    """Fault: arguments as an object, ids that are there twice, or content that holds the calls."""
    answer = output_parser(turn=3).parse(f"<think>\nwell\n</think>\n\nLet me see.\n{CALL}\n{CALL}\n")
    arguments = '{"q":"é","n":1}'
    assert answer.as_output() == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "get", "arguments": arguments}}
            for name in ("call_3_1", "call_3_2")
        ],
        "reasoning_content": "well",
    }
    assert answer.warnings == []


def test_an_answer_goes_back_into_the_history() -> None:
    """Fault: arguments as text, which templates cannot read; reasoning or ids lost."""
    message = output_parser().parse(f"<think>well</think>a {CALL}").as_message()
    function = {"name": "get", "arguments": {"q": "é", "n": 1}}
    assert message == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "well",
        "tool_calls": [{"id": "call_1_1", "type": "function", "function": function}],
    }
    assert output_parser().parse("a").as_message() == {"role": "assistant", "content": "a"}


def test_content_is_null_only_beside_calls() -> None:
    """Fault: an empty answer without content, or a call with an empty one."""
    assert output_parser().parse(CALL).as_output()["content"] is None
    assert output_parser().parse("").as_output() == {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "tool_calls": [],
    }
    assert output_parser().parse(" a\n").as_output()["content"] == " a\n"
    bare = output_parser(tool_parser=None).parse(f"a {CALL} ")
    assert (bare.content, bare.calls, bare.warnings) == (f"a {CALL} ", [], [])


def test_what_cannot_be_read_is_said() -> None:
    """Fault: a malformed call without a warning."""
    bad = "<tool_call>{get it}</tool_call>"
    [one] = output_parser().parse(bad).warnings
    sentence = "1 place of the answer begins a tool call that cannot be read as hermes writes calls"
    assert one == f"{sentence}; it stays in the content"
    answer = output_parser().parse(f"{bad} {CALL} {bad}")
    assert answer.content == f"{bad}  {bad}" and len(answer.calls) == 1
    assert answer.warnings[0].startswith("2 places of the answer begin a tool call")


def test_one_call_where_one_is_wanted() -> None:
    """Fault: parallel_tool_calls false does nothing, or drops calls in silence."""
    answer = output_parser(one_call=True).parse(CALL * 3)
    assert [call.id for call in answer.calls] == ["call_1_1"]
    assert answer.warnings == ["parallel_tool_calls is false: of the 3 tool calls in the answer the first one is given"]
    assert output_parser(one_call=True).parse(CALL).warnings == []


@table(
    "text, reasoning, content, num_calls, kinds",
    [
        (f"<think>a {CALL}</think>", f"a {CALL}", "", 0, []),
        (f"<think>a {CALL}</think>b{CALL}", f"a {CALL}", "b", 1, []),
        (f"<think>a\n\n{CALL}\n{CALL}", "a", "", 2, []),
        (f"<think>{CALL} b", None, "b", 1, []),
        (f"<think>a <tool_call>{{}}</tool_call> {CALL}", "a <tool_call>{}</tool_call>", "", 1, []),
        ("<think>a <tool_call>{", "a <tool_call>{", "", 0, ["cut_reasoning"]),
    ],
)
def test_a_call_in_a_thought(text: str, reasoning: str | None, content: str, num_calls: int, kinds: list[str]) -> None:
    """Fault: what a model considers is done; or a call behind a thought that never ends is lost."""
    answer = output_parser().parse(text)
    assert (answer.reasoning, answer.content, len(answer.calls)) == (reasoning, content, num_calls)
    assert [warning.kind for warning in answer.warnings] == kinds


def test_a_call_of_no_offered_tool_is_said() -> None:
    """Fault: an agent's loop gets a call of a tool that the request does not have, without a word."""
    other = CALL.replace("get", "put")
    [warning] = output_parser(offered=frozenset({"get"})).parse(CALL + other * 2).warnings
    assert warning == 'the answer calls "put", which the request does not offer as a tool'
    assert output_parser(offered=frozenset({"get"})).parse(CALL).warnings == []


@table(
    "text, is_open, reasoning, content, is_cut",
    [
        ("<think>a</think>b", False, "a", "b", False), (" \n<think>\na\n</think>\n\n b ", False, "a", " b ", False),
        ("a</think>b", True, "a", "b", False), ("a</think>b", False, None, "a</think>b", False),
        ("<think>a</think>b", True, "a", "b", False), ("a <think>b</think>", False, None, "a <think>b</think>", False),
        ("<think>a", False, "a", "", True), ("a", True, "a", "", True), ("a", False, None, "a", False),
        ("<think>\n\n</think>\n\nb", False, None, "b", False), ("", True, None, "", True), ("", False, None, "", False),
        ("<think>a</think>b</think>c", False, "a", "b</think>c", False),
    ],
)  # fmt: skip
def test_a_thought_and_what_follows(
    text: str, is_open: bool, reasoning: str | None, content: str, is_cut: bool
) -> None:
    """Fault: reasoning in the content, content in the reasoning, or a cut thought that passes for an answer."""
    assert THINK.split(text, is_open) == Thought(reasoning, content, is_cut)


def test_words_and_other_markers_enclose_thoughts_too() -> None:
    """Fault: Granite's or Magistral's reasoning stays in the content."""
    assert PARSERS["mistral"].split("[THINK]a[/THINK]b", False) == Thought("a", "b")
    for begin, end in (("Here is", "Here's"), ("Here's", "Here is")):
        text = f"{begin} my thought process: a\n\n{end} my response: b"
        assert PARSERS["granite"].split(text, False) == Thought("a", " b")
    assert PARSERS["granite"].markers == () and THINK.markers == ("<think>", "</think>")


def test_the_reasoning_parser_is_told() -> None:
    """Fault: a model that does not think has its text taken for thoughts, or an option does nothing."""
    assert tuple(PARSERS) == REASONING_PARSERS
    assert choose_reasoning_parser("auto", ["{{ bos_token }}", "<s>"]) is None
    assert choose_reasoning_parser("auto", ["", "<s>", "<think>"]) is THINK
    assert choose_reasoning_parser("auto", ["[THINK]"]) is PARSERS["mistral"]
    assert choose_reasoning_parser("none", ["<think>"]) is None
    assert choose_reasoning_parser("granite", ["<think>"]) is PARSERS["granite"]


PIECES = ["<think>", "</think>", CALL, "<tool_call>", "x", " ", "\n"]


@given(st.lists(st.sampled_from(PIECES)).map("".join), st.booleans())
def test_any_text_is_taken_apart(text: str, is_open: bool) -> None:
    """Every part comes from the text, and a cut thought is said."""
    answer = output_parser(is_open=is_open).parse(text)
    assert (answer.reasoning or "") in text
    orjson.dumps(answer.as_output())
    if answer.reasoning is None and not answer.calls and not answer.warnings and "</think>" not in text:
        assert answer.content == text


def test_ids_are_unique_whatever_is_recorded() -> None:
    """Fault: an id that an earlier turn, another choice or a recorded message has."""
    generator = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    for form in ("plain", "nine"):
        used: set[str] = {"call_1_1", "call_1_1x", "call_2_1"}
        for turn in generator.sample(range(1, 5000), 40):
            for choice in range(3):
                calls = [Call("f", {}, generator.choice([None, "abcdefgh1", "call_7_1", ""])) for _ in range(4)]
                made = call_ids(calls, form, turn, choice, used)  # type: ignore[arg-type]
                assert made == call_ids(calls, form, turn, choice, used)  # type: ignore[arg-type]
                assert len({*made} | used) == len(made) + len(used)
                used |= {*made}
                if form == "nine":
                    assert all(len(name) == 9 and name.isalnum() and name.isascii() for name in made)
    assert call_ids([Call("f", {}, "own")], "plain", 1, 0, ()) == ["own"]
    assert call_ids([Call("f", {}, "own")], "nine", 1, 0, ()) == ["00013ydj5"]
    assert call_ids([Call("f", {})], "plain", 2, 1, ()) == ["call_2_1_1"]
    assert call_ids([Call("f", {}, "x" * 65)], "plain", 2, 0, ()) == ["call_2_1"]
    assert call_ids([Call("f", {}, "x"), Call("f", {}, "")], "plain", 2, 0, ()) == ["x", "call_2_2"]
    assert call_ids([Call("f", {}, "x" * 64)], "plain", 2, 0, ()) == ["x" * 64]
    assert call_ids([Call("f", {})], "nine", 1, 0, {"00013ydj5"}) == ["oxyzhdczl"]


def test_recorded_ids_are_those_of_calls_and_answers() -> None:
    """Fault: an id that only a tool's message has is given again."""
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {}}, {"function": {}}]},
        {"role": "tool", "content": "", "tool_call_id": "b"},
        {"role": "tool", "content": ""},
    ]
    assert recorded_ids(messages) == {"a", "b"}
