"""Messages: what a line of messages becomes, and the sentence for each fault."""

from __future__ import annotations

from typing import Any

from apcbatch.data.conversation import Conversation, Parts
from tests.data.conftest import USER, fault, good
from tests.effort import table


def call(**function: object) -> dict[str, Any]:
    """A tool call."""
    return {"id": "1", "type": "function", "function": function}


def test_a_line_of_messages_becomes_a_conversation() -> None:
    """Every key of the format arrives in the form that templates read."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Mia"},
        {"role": "assistant", "content": None, "tool_calls": [call(name="f", arguments='{"x": [1, 2]}')]},
        {"role": "tool", "content": "3", "tool_call_id": "1", "weight": 1, "text": "4"},
        {"role": "assistant", "content": "3", "tool_calls": [], "reasoning_content": "easy", "refusal": None},
    ]
    record = good({"id": "c", "messages": messages, "tools": tools, "score": 0.5})
    assert record == Conversation(id="c", line=3, messages=[
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": Parts(("a", "b")), "name": "Mia"},
        {"role": "assistant", "content": "", "tool_calls": [call(name="f", arguments={"x": [1, 2]})]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "3", "reasoning_content": "easy"},
    ], tools=tools, source_format="messages", columns=("score",))  # fmt: skip


ASKED = {"role": "assistant", "tool_calls": [call(name="f", arguments={})]}
RESULT = {"role": "tool", "content": "3"}


@table("messages, place", [
    ([RESULT], 0),
    ([USER, {"role": "assistant", "content": "x"}, RESULT], 2),
    ([USER, ASKED, RESULT], None), ([USER, ASKED, RESULT, RESULT], 3),
    ([USER, ASKED, RESULT | {"tool_call_id": "1"}, RESULT | {"tool_call_id": "2"}], 3),
    ([USER, ASKED, USER, RESULT | {"tool_call_id": "1"}], None),
    ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, RESULT, RESULT, RESULT], 3),
    ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, RESULT | {"tool_call_id": "9"}], None),
])  # fmt: skip
def test_a_result_without_a_call_is_said(messages: list[Any], place: int | None) -> None:
    """Fault: a cut history, whose tool results answer nothing, goes to the template without a word."""
    found = good({"messages": messages}).warnings
    assert found == (
        (f"messages[{place}] is a tool's result without a tool call before it",) if place is not None else ()
    )
    assert all(warning.kind == "tool_results" for warning in found)


@table("arguments, read", [
    (None, {}), ({}, {}), ("{}", {}), ('{"a": 1}', {"a": 1}), ("[1]", "[1]"), ("{'a': 1", "{'a': 1"), ("", {}),
    (" \n", {}),
])  # fmt: skip
def test_arguments_are_an_object_wherever_they_can_be(arguments: object, read: object) -> None:
    """Templates write `arguments | tojson`: JSON text would be quoted twice; text that is no JSON is kept."""
    message = {"role": "assistant", "tool_calls": [call(name="f", arguments=arguments)]}
    assert good({"messages": [message]}).messages[0]["tool_calls"][0]["function"]["arguments"] == read


MESSAGE_FAULTS = [
    ({"messages": {}}, "messages is an object; expected a list of messages"),
    ({"messages": None}, "messages is null; expected a list of messages"),
    ({"messages": []}, "messages is empty; expected at least one message"),
    ({"messages": ["hi"]}, 'messages[0] is "hi"; expected a message: an object with role and content'),
    ({"messages": [USER, USER, {"role": "asistant", "content": "x"}]},
     'messages[2].role is "asistant"; expected system, user, assistant or tool'),
    ({"messages": [{"content": "x"}]}, "messages[0].role is missing; expected system, user, assistant or tool"),
    ({"messages": [{"role": 3}]}, "messages[0].role is 3; expected system, user, assistant or tool"),
    ({"messages": [{"role": "user", "content": 1.5}]},
     "messages[0].content is 1.5; expected a string or a list of text parts"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing; expected a string or a list of text parts"),
    ({"messages": [{"role": "tool", "content": None}]},
     "messages[0].content is null; expected a string or a list of text parts"),
    ({"messages": [{"role": "assistant"}]},
     "messages[0].content is missing; expected a string, a list of text parts, or tool_calls beside it"),
    ({"messages": [{"role": "user", "content": ["a"]}]},
     'messages[0].content[0] is "a"; expected a text part: an object with type and text'),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     'messages[0].content[0].type is "image_url"; expected "text": only text can be read'),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]},
     'messages[0].content[0].type is missing; expected "text"'),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
     "messages[0].content[0].text is null; expected a string"),
    ({"messages": [{**USER, "name": []}]}, "messages[0].name is a list; expected a string"),
    ({"messages": [{**USER, "tool_call_id": 1}]}, "messages[0].tool_call_id is 1; expected a string"),
    ({"messages": [{**USER, "tool_calls": [call(name="f")]}]},
     "messages[0].tool_calls stands in a message of the role user; only an assistant calls tools"),
    ({"messages": [{"role": "assistant", "tool_calls": "f"}]},
     'messages[0].tool_calls is "f"; expected a list of tool calls'),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]},
     "messages[0].tool_calls[0] is 1; expected a tool call: an object with id, type and function"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "code"}]}]},
     'messages[0].tool_calls[0].type is "code"; expected "function"'),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
     "messages[0].tool_calls[0].function is missing; expected an object with name and arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
     "messages[0].tool_calls[0].id is 1; expected a string"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
     'messages[0].tool_calls[0].function is "f"; expected an object with name and arguments'),
    ({"messages": [{"role": "assistant", "tool_calls": [call(arguments="{}")]}]},
     "messages[0].tool_calls[0].function.name is missing; expected a string"),
    ({"messages": [{"role": "assistant", "tool_calls": [call(name="f", arguments=[1])]}]},
     "messages[0].tool_calls[0].function.arguments is a list; expected an object, or an object as JSON text"),
    (
        {
            "messages": [
                {"role": "assistant", "function_call": {"name": "f"}, "tool_calls": [{"function": {"name": "f"}}]}
            ]
        },
        "messages[0].function_call is the older form of tool_calls, which stand beside it; give one",
    ),
    ({"messages": [USER], "tools": {}}, "tools is an object; expected a list of tool schemas"),
    ({"messages": [USER], "tools": ["f"]}, 'tools[0] is "f"; expected a tool schema: an object'),
    ({"messages": [USER], "tools": [{"function": "f"}]}, 'tools[0].function is "f"; expected an object with a name'),
    ({"messages": [USER], "tools": [{"function": {}}]}, "tools[0].function.name is missing; expected a string"),
    ({"id": 1.5, "messages": [USER]}, "id is 1.5; expected a string that is not empty, or an integer"),
    ({"id": "", "messages": [USER]}, 'id is ""; expected a string that is not empty, or an integer'),
    ({"id": True, "messages": [USER]}, "id is true; expected a string that is not empty, or an integer"),
    ({"messages": [{"role": "x" * 99 + "\n", "content": ""}]},
     f'messages[0].role is "{"x" * 37}..."; expected system, user, assistant or tool'),
]  # fmt: skip


@table("record, sentence", MESSAGE_FAULTS)
def test_each_fault_has_its_sentence(record: object, sentence: str) -> None:
    """A user finds the fault in a line of 100 kB by the sentence alone: where, what came, what was due."""
    assert fault(record) == sentence
