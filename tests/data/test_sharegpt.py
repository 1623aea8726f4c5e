"""Sharegpt lines: who speaks in which role, and the sentence for each fault."""

from __future__ import annotations

from tests.data.conftest import fault, good
from tests.effort import table


def test_sharegpt_speakers_become_roles() -> None:
    """All names in use for the four roles, a system text beside the list, tools as JSON text."""
    spoken = [
        ("human", "a"),
        ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
        ("observation", "b"),
        ("gpt", "c"),
        ("user", "d"),
        ("function_call", "not JSON"),
        ("tool", "e"),
        ("assistant", '{"name": "f", "arguments": {}}'),
        ("user", '{"name": "f", "arguments": {}}'),
    ]
    record = good(
        {
            "id": 9,
            "system": "be brief",
            "conversations": [{"from": who, "value": text} for who, text in spoken],
            "tools": '[{"name": "f"}]',
        }
    )
    called = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert record.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "not JSON"},
        {"role": "tool", "content": "e"},
        {"role": "assistant", "content": '{"name": "f", "arguments": {}}'},
        {"role": "user", "content": '{"name": "f", "arguments": {}}'},
    ]
    assert (record.tools, record.source_format, record.id) == ([{"name": "f"}], "sharegpt", "9")
    assert good({"conversations": [{"from": "human", "value": "a"}], "tools": " "}).tools is None


SHAREGPT_FAULTS = [
    ({"conversations": "x"}, 'conversations is "x"; expected a list of objects with from and value'),
    ({"conversations": []}, "conversations is empty; expected at least one message"),
    ({"conversations": [1]}, "conversations[0] is 1; expected an object with from and value"),
    ({"conversations": [{"value": "a"}]}, "conversations[0].from is missing; expected human, gpt, system or tool"),
    (
        {"conversations": [{"from": "gtp", "value": "a"}]},
        'conversations[0].from is "gtp"; expected human, gpt, system or tool',
    ),
    ({"conversations": [{"from": "human", "value": None}]}, "conversations[0].value is null; expected a string"),
    ({"conversations": [{"from": "human", "value": "a"}], "system": 5}, "system is 5; expected a string"),
    (
        {"conversations": [{"from": "human", "value": "a"}], "tools": "{"},
        'tools is "{"; expected a list of tool schemas',
    ),
]


@table("record, sentence", SHAREGPT_FAULTS)
def test_each_fault_has_its_sentence(record: object, sentence: str) -> None:
    """A user finds the fault in a line of 100 kB by the sentence alone: where, what came, what was due."""
    assert fault(record) == sentence
