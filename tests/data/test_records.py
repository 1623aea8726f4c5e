"""Records: what each format becomes, and the sentence for each fault."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apcbatch.data.records import BadLine, Conversation, parse_line, parse_record
from apcbatch.formats import FORMATS

USER = {"role": "user", "content": "hi"}


def call(**function: object) -> dict[str, Any]:
    """A tool call."""
    return {"id": "1", "type": "function", "function": function}


def batch(body: object = None, **keys: object) -> dict[str, Any]:
    """A batch line for a chat; keys set to `...` are left out."""
    line = {
        "custom_id": "b-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [USER]} if body is None else body,
        **keys,
    }
    return {key: value for key, value in line.items() if value is not ...}


def completion(**body: object) -> dict[str, Any]:
    """A batch line for a completion."""
    return batch(body, url="/v1/completions")


def good(record: object, line: int = 3) -> Conversation:
    """The conversation that a record becomes."""
    parsed = parse_record(record, line)
    assert isinstance(parsed, Conversation), parsed
    return parsed


def fault(record: object) -> str:
    """The sentence about a record that cannot be answered."""
    parsed = parse_record(record, 3)
    assert isinstance(parsed, BadLine), parsed
    assert (parsed.error.code, parsed.error.line, parsed.line) == ("invalid_request", 3, 3)
    return parsed.error.message


def test_a_line_of_messages_becomes_a_conversation() -> None:
    """Every key of the format arrives in the form that templates read."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "Mia",
        },
        {"role": "assistant", "content": None, "tool_calls": [call(name="f", arguments='{"x": [1, 2]}')]},
        {"role": "tool", "content": "3", "tool_call_id": "1", "weight": 1},
        {"role": "assistant", "content": "3", "tool_calls": [], "reasoning_content": "easy", "refusal": None},
    ]
    record = good({"id": "c", "messages": messages, "tools": tools, "score": 0.5})
    assert record == Conversation(
        id="c",
        line=3,
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "ab", "name": "Mia"},
            {"role": "assistant", "content": "", "tool_calls": [call(name="f", arguments={"x": [1, 2]})]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            {"role": "assistant", "content": "3", "reasoning_content": "easy"},
        ],
        tools=tools,
        source_format="messages",
    )


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (None, {}),
        ({}, {}),
        ("{}", {}),
        ('{"a": 1}', {"a": 1}),
        ("[1]", "[1]"),
        ("{'a': 1", "{'a': 1"),
        ("", ""),
    ],
)
def test_arguments_are_an_object_wherever_they_can_be(arguments: object, read: object) -> None:
    """Templates write `arguments | tojson`: JSON text would be quoted twice; text that is no JSON is kept."""
    message = {"role": "assistant", "tool_calls": [call(name="f", arguments=arguments)]}
    assert good({"messages": [message]}).messages[0]["tool_calls"][0]["function"]["arguments"] == read


@pytest.mark.parametrize(
    ("given_id", "conversation_id"),
    [("a b", "a b"), (12, "12"), (-1, "-1"), (None, "line-3"), (..., "line-3")],
)
def test_ids_are_strings_and_a_missing_one_is_the_line(given_id: object, conversation_id: str) -> None:
    """Two lines without an id must not be taken for the same conversation."""
    record = {"messages": [USER]} if given_id is ... else {"id": given_id, "messages": [USER]}
    assert good(record).id == conversation_id
    assert good(record).request_id(2) == f"{conversation_id}#2"


def test_no_tools_are_none() -> None:
    """An empty list, null and no key are the same to a template."""
    for extra in ({}, {"tools": None}, {"tools": []}):
        assert good({"messages": [USER], **extra}).tools is None


def test_a_batch_chat_keeps_its_custom_id_and_its_parameters() -> None:
    """The body's parameters override the flags for this request alone."""
    body = {
        "model": "any",
        "messages": [USER],
        "max_tokens": 5,
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "seed": 11,
        "logprobs": True,
        "ignore_eos": True,
        "stream": False,
        "n": 1,
        "stop": None,
        "user": "me",
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "frequency_penalty": 0.0,
    }
    record = good(batch(body))
    assert (record.id, record.custom_id, record.request_id(1)) == ("b-1", "b-1", "b-1")
    assert record.params == {
        "max_tokens": 7,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 11,
        "logprobs": True,
        "ignore_eos": True,
    }
    assert good(batch({"messages": [USER], "max_tokens": 5, "seed": None})).params == {"max_tokens": 5}


def test_tool_choice_none_hides_the_tools() -> None:
    """A request that forbids calls must not be shown the tools."""
    body = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert good(batch(body)).tools == body["tools"]
    assert good(batch({**body, "tool_choice": "none"})).tools is None


@pytest.mark.parametrize("prompt", ["once upon", [5, 0, 7]])
def test_a_batch_completion_has_a_prompt(prompt: object) -> None:
    """Text and token ids both."""
    record = good(completion(prompt=prompt, max_tokens=2, logprobs=1))
    assert (record.prompt, record.messages, record.params) == (
        prompt,
        [],
        {"max_tokens": 2, "logprobs": True},
    )


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
        ("assistant", "f"),
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
        {"role": "assistant", "content": "f"},
    ]
    assert (record.tools, record.source_format, record.id) == ([{"name": "f"}], "sharegpt", "9")
    assert good({"conversations": [{"from": "human", "value": "a"}], "tools": " "}).tools is None


MESSAGE_FAULTS = [
    ({"messages": {}}, "messages is an object; expected a list of messages"),
    ({"messages": None}, "messages is null; expected a list of messages"),
    ({"messages": []}, "messages is empty; expected at least one message"),
    ({"messages": ["hi"]}, 'messages[0] is "hi"; expected a message: an object with role and content'),
    (
        {"messages": [USER, USER, {"role": "asistant", "content": "x"}]},
        'messages[2].role is "asistant"; expected system, user, assistant or tool',
    ),
    (
        {"messages": [{"content": "x"}]},
        "messages[0].role is missing; expected system, user, assistant or tool",
    ),
    ({"messages": [{"role": 3}]}, "messages[0].role is 3; expected system, user, assistant or tool"),
    (
        {"messages": [{"role": "user", "content": 1.5}]},
        "messages[0].content is 1.5; expected a string or a list of text parts",
    ),
    (
        {"messages": [{"role": "user"}]},
        "messages[0].content is missing; expected a string or a list of text parts",
    ),
    (
        {"messages": [{"role": "tool", "content": None}]},
        "messages[0].content is null; expected a string or a list of text parts",
    ),
    (
        {"messages": [{"role": "assistant", "content": None}]},
        "messages[0].content is null; expected a string, a list of text parts, or tool_calls beside it",
    ),
    (
        {"messages": [{"role": "user", "content": ["a"]}]},
        'messages[0].content[0] is "a"; expected a text part: an object with type and text',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        'messages[0].content[0].type is "image_url"; expected "text": only text can be read',
    ),
    (
        {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
        'messages[0].content[0].type is missing; expected "text"',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "messages[0].content[0].text is null; expected a string",
    ),
    ({"messages": [{**USER, "name": []}]}, "messages[0].name is a list; expected a string"),
    ({"messages": [{**USER, "tool_call_id": 1}]}, "messages[0].tool_call_id is 1; expected a string"),
    (
        {"messages": [{**USER, "tool_calls": [call(name="f")]}]},
        "messages[0].tool_calls stands in a message of the role user; only an assistant calls tools",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": "f"}]},
        'messages[0].tool_calls is "f"; expected a list of tool calls',
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [1]}]},
        "messages[0].tool_calls[0] is 1; expected a tool call: an object with id, type and function",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "code"}]}]},
        'messages[0].tool_calls[0].type is "code"; expected "function"',
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function is missing; expected an object with name and arguments",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
        "messages[0].tool_calls[0].id is 1; expected a string",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
        'messages[0].tool_calls[0].function is "f"; expected an object with name and arguments',
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [call(arguments="{}")]}]},
        "messages[0].tool_calls[0].function.name is missing; expected a string",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [call(name="f", arguments=[1])]}]},
        "messages[0].tool_calls[0].function.arguments is a list; "
        "expected an object, or an object as JSON text",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
        "messages[0].function_call is the old form of a tool call; give it as tool_calls",
    ),
    ({"messages": [USER], "tools": {}}, "tools is an object; expected a list of tool schemas"),
    ({"messages": [USER], "tools": ["f"]}, 'tools[0] is "f"; expected a tool schema: an object'),
    (
        {"messages": [USER], "tools": [{"function": "f"}]},
        'tools[0].function is "f"; expected an object with a name',
    ),
    (
        {"messages": [USER], "tools": [{"function": {}}]},
        "tools[0].function.name is missing; expected a string",
    ),
    ({"id": 1.5, "messages": [USER]}, "id is 1.5; expected a string that is not empty, or an integer"),
    ({"id": "", "messages": [USER]}, 'id is ""; expected a string that is not empty, or an integer'),
    ({"id": True, "messages": [USER]}, "id is true; expected a string that is not empty, or an integer"),
    (
        {"messages": [{"role": "x" * 99 + "\n", "content": ""}]},
        f'messages[0].role is "{"x" * 37}..."; expected system, user, assistant or tool',
    ),
]
BATCH_FAULTS = [
    (batch(custom_id=...), "custom_id is missing; expected a string that is not empty"),
    (batch(custom_id=5), "custom_id is 5; expected a string that is not empty"),
    (batch(custom_id=""), 'custom_id is ""; expected a string that is not empty'),
    (batch(method=...), "method is missing; expected POST"),
    (batch(method="GET"), 'method is "GET"; expected POST'),
    (batch(url=...), "url is missing; expected /v1/chat/completions or /v1/completions"),
    (
        batch(url="/v1/embeddings"),
        'url is "/v1/embeddings"; expected /v1/chat/completions or /v1/completions',
    ),
    (batch(body=...), "body is missing; expected an object with messages or a prompt"),
    (batch([]), "body is a list; expected an object with messages or a prompt"),
    (batch({}), "body.messages is missing; expected a list of messages"),
    (batch({"messages": []}), "body.messages is empty; expected at least one message"),
    (
        batch({"messages": [{"role": "bot", "content": ""}]}),
        'body.messages[0].role is "bot"; expected system, user, assistant or tool',
    ),
    (batch({"messages": [USER], "tools": 1}), "body.tools is 1; expected a list of tool schemas"),
    (completion(), "body.prompt is missing; expected a string or a list of token ids"),
    (completion(prompt=None), "body.prompt is null; expected a string or a list of token ids"),
    (completion(prompt=""), "body.prompt is empty; expected at least one token"),
    (completion(prompt=[]), "body.prompt is empty; expected at least one token"),
    (
        completion(prompt=["a", "b"]),
        'body.prompt[0] is "a"; expected a token id; one line asks for one completion',
    ),
    (
        completion(prompt=[1, -2]),
        "body.prompt[1] is -2; expected a token id; one line asks for one completion",
    ),
    (
        completion(prompt=[True]),
        "body.prompt[0] is true; expected a token id; one line asks for one completion",
    ),
    (
        completion(prompt="a", logprobs=5),
        "body.logprobs is 5; expected 0 or 1: only the chosen token's log-probability is given",
    ),
]
BODY_FAULTS = [
    ("stream", True, "body.stream is true; a batch is answered in one piece: leave stream out"),
    ("stream", "yes", 'body.stream is "yes"; expected true or false'),
    ("n", 2, "body.n is 2; expected 1: one line asks for one answer"),
    ("n", 0, "body.n is 0; expected an integer of at least 1"),
    ("best_of", 3, "body.best_of is 3; expected 1: one line asks for one answer"),
    ("model", 1, "body.model is 1; expected a string"),
    ("max_tokens", 0, "body.max_tokens is 0; expected an integer of at least 1"),
    ("max_tokens", 1.5, "body.max_tokens is 1.5; expected an integer of at least 1"),
    ("max_completion_tokens", True, "body.max_completion_tokens is true; expected an integer of at least 1"),
    ("temperature", 2.5, "body.temperature is 2.5; expected a number from 0 to 2"),
    ("temperature", "hot", 'body.temperature is "hot"; expected a number from 0 to 2'),
    ("top_p", 0, "body.top_p is 0; expected a number above 0 and up to 1"),
    ("top_p", 1.1, "body.top_p is 1.1; expected a number from 0 to 1"),
    ("seed", "x", 'body.seed is "x"; expected an integer'),
    ("logprobs", 1, "body.logprobs is 1; expected true or false"),
    ("ignore_eos", 1, "body.ignore_eos is 1; expected true or false"),
    ("stop", ["\n"], "body.stop is a list, which is not supported; leave it out or give null"),
    ("stop", "x", 'body.stop is "x", which is not supported; leave it out or give null'),
    (
        "logit_bias",
        {"1": 2},
        "body.logit_bias is an object, which is not supported; leave it out or give null",
    ),
    (
        "presence_penalty",
        0.1,
        "body.presence_penalty is 0.1, which is not supported; leave it out or give 0",
    ),
    ("top_k", 40, "body.top_k is 40, which is not supported; leave it out or give 0"),
    ("top_logprobs", 2, "body.top_logprobs is 2, which is not supported; leave it out or give 0"),
    ("echo", True, "body.echo is true, which is not supported; leave it out or give false"),
    (
        "tool_choice",
        "required",
        'body.tool_choice is "required", which is not supported; leave it out or give "auto" or "none"',
    ),
    (
        "response_format",
        {"type": "json_object"},
        'body.response_format is an object, which is not supported; leave it out or give {"type": "text"}',
    ),
]
SHAREGPT_FAULTS = [
    ({"conversations": "x"}, 'conversations is "x"; expected a list of objects with from and value'),
    ({"conversations": []}, "conversations is empty; expected at least one message"),
    ({"conversations": [1]}, "conversations[0] is 1; expected an object with from and value"),
    (
        {"conversations": [{"value": "a"}]},
        "conversations[0].from is missing; expected human, gpt, system or tool",
    ),
    (
        {"conversations": [{"from": "gtp", "value": "a"}]},
        'conversations[0].from is "gtp"; expected human, gpt, system or tool',
    ),
    (
        {"conversations": [{"from": "human", "value": None}]},
        "conversations[0].value is null; expected a string",
    ),
    (
        {"conversations": [{"from": "human", "value": "a"}], "system": 5},
        "system is 5; expected a string",
    ),
    (
        {"conversations": [{"from": "human", "value": "a"}], "tools": "{"},
        'tools is "{"; expected a list of tool schemas, or such a list as JSON text',
    ),
]
OTHER_FAULTS = [
    ([], "the line is a list; expected an object"),
    (None, "the line is null; expected an object"),
    ("x", 'the line is "x"; expected an object'),
    ({}, 'the line needs "messages", "custom_id" with "body", or "conversations"; its keys are none'),
    (
        {"id": 1, "text": "a"},
        'the line needs "messages", "custom_id" with "body", or "conversations"; its keys are "id", "text"',
    ),
]


@pytest.mark.parametrize(
    ("record", "sentence"), MESSAGE_FAULTS + BATCH_FAULTS + SHAREGPT_FAULTS + OTHER_FAULTS
)
def test_each_fault_has_its_sentence(record: object, sentence: str) -> None:
    """A user finds the fault in a line of 100 kB by the sentence alone: where, what came, what was due."""
    assert fault(record) == sentence


@pytest.mark.parametrize(("key", "value", "sentence"), BODY_FAULTS)
def test_each_parameter_that_cannot_be_honoured_is_refused(key: str, value: object, sentence: str) -> None:
    """A parameter that is dropped in silence gives an answer that nobody asked for."""
    assert fault(batch({"messages": [USER], key: value})) == sentence


@pytest.mark.parametrize(
    ("record", "custom_id"),
    [
        ({"id": "c", "messages": []}, "c#1"),
        ({"id": 5, "conversations": []}, "5#1"),
        ({"messages": []}, "line-3#1"),
        ({"id": [], "messages": [USER]}, "line-3#1"),
        (batch(method="GET"), "b-1"),
        (batch(custom_id=1), None),
        ([], None),
        ({"id": "c"}, None),
    ],
)
def test_a_bad_line_keeps_the_custom_id_that_it_tells(record: object, custom_id: str | None) -> None:
    """The error record must be found by the id its owner knows."""
    parsed = parse_record(record, 3)
    assert isinstance(parsed, BadLine)
    assert parsed.custom_id == custom_id


def test_an_explicit_format_takes_no_other() -> None:
    """A line of another format under `--format batch` is an error record, not a guess."""
    shapes = {
        "messages": {"messages": [USER]},
        "batch": batch(),
        "sharegpt": {"conversations": [{"from": "human", "value": "a"}]},
    }
    assert set(shapes) == set(FORMATS)
    for wanted in shapes:
        for name, record in shapes.items():
            parsed = parse_record(record, 1, wanted)  # type: ignore[arg-type]
            if name == wanted:
                assert isinstance(parsed, Conversation) and parsed.source_format == name
            else:
                assert isinstance(parsed, BadLine)
                assert parsed.error.message.startswith(f"a line of the format {wanted} needs ")


@pytest.mark.parametrize(
    "data", [b"{", b'{"messages": [}', b"\xff\xfe{}", b'{"a": NaN}', b"{} {}", b'"\\ud800"', b"[" * 100_000]
)
def test_what_is_not_json_is_told_with_the_column(data: bytes) -> None:
    """Torn lines, other encodings, JavaScript's NaN, lone surrogates and absurd nesting end one line each."""
    parsed = parse_line(data, 4)
    assert isinstance(parsed, BadLine)
    assert (parsed.error.code, parsed.error.line, parsed.custom_id) == ("invalid_json", 4, None)
    assert parsed.error.message.startswith("not valid JSON: ") and "at column " in parsed.error.message


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
ROLE = st.sampled_from(["system", "user", "assistant", "tool", "developer", "bot"])
MESSAGE = JSON | st.fixed_dictionaries(
    {"role": ROLE | JSON},
    optional={
        "content": st.text(max_size=5) | JSON,
        "tool_calls": st.lists(
            JSON
            | st.fixed_dictionaries(
                {"function": JSON | st.fixed_dictionaries({"name": JSON, "arguments": JSON})}
            )
        )
        | JSON,
        "name": JSON,
    },
)
BODY = JSON | st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(MESSAGE, max_size=3) | JSON,
        "prompt": JSON | st.lists(JSON),
        **{
            key: JSON
            for key in ("max_tokens", "top_p", "n", "stop", "logprobs", "tools", "tool_choice", "top_k")
        },
    },
)
LINE = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "messages": st.lists(MESSAGE, max_size=4) | JSON,
        "tools": JSON,
        "custom_id": st.text(max_size=3) | JSON,
        "method": st.just("POST") | JSON,
        "url": st.sampled_from(["/v1/chat/completions", "/v1/completions"]) | JSON,
        "body": BODY,
        "conversations": JSON
        | st.lists(
            st.fixed_dictionaries(
                {"from": st.sampled_from(["human", "gpt", "function_call", "x"]), "value": JSON}
            )
        ),
        "system": JSON,
    },
)


@settings(max_examples=300, deadline=None)
@given(record=LINE | JSON, wanted=st.sampled_from([None, *FORMATS]))
def test_any_json_becomes_a_conversation_or_a_bad_line(record: object, wanted: Any) -> None:
    """An exception out of a line would end the job, or lose the line."""
    parsed = parse_line(json.dumps(record).encode(), 1, wanted)
    assert isinstance(parsed, (Conversation, BadLine))
    if isinstance(parsed, BadLine):
        assert parsed.error.code in ("invalid_json", "invalid_request") and "\n" not in parsed.error.message
    else:
        assert parsed.messages or parsed.prompt
        assert all(isinstance(message["content"], str) for message in parsed.messages)
        orjson.dumps(parsed.params)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_become_a_conversation_or_a_bad_line(data: bytes) -> None:
    """A line may hold anything."""
    assert isinstance(parse_line(data, 1), (Conversation, BadLine))
