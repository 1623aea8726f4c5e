"""Records of every format: ids, the choice of the format, lines that are none, and any JSON at all."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.input.layouts import LineOptions
from apcbatch.data.input.records import parse_line, parse_record
from apcbatch.formats import FORMATS
from tests.data.conftest import USER, batch, fault
from tests.effort import table, tries

OTHER_FAULTS = [
    ([], "the line is a list; expected an object"),
    (None, "the line is null; expected an object"),
    ("x", 'the line is "x"; expected an object'),
    ({}, 'the line needs "messages", "custom_id" with "body", or "conversations"; its keys are none'),
    (
        {"id": 1, "text": "a"},
        'the line needs "messages", "custom_id" with "body", or "conversations"; its keys are "id", "text"; '
        'if "text" is what the user says, give --prompt-column text',
    ),
]


@table("record, sentence", OTHER_FAULTS)
def test_each_fault_has_its_sentence(record: object, sentence: str) -> None:
    """A user finds the fault in a line of 100 kB by the sentence alone: where, what came, what was due."""
    assert fault(record) == sentence


@table("record, custom_id, conversation", [
    ({"id": "c", "messages": []}, "c#1", "c"), ({"id": 5, "conversations": []}, "5#1", "5"),
    ({"messages": []}, "line-3#1", "line-3"),
    ({"id": [], "messages": [USER]}, "line-3#1", "line-3"),
    (batch(method="GET"), "b-1", "b-1"), (batch(custom_id=1), None, None), ([], None, None), ({"a": 1}, None, None),
    ({"id": "c"}, "c#1", "c"),
    ({"custom_id": "c", "input": "hi"}, "c", "c"),
])  # fmt: skip
def test_a_bad_line_keeps_the_ids_that_it_tells(record: object, custom_id: str | None, conversation: object) -> None:
    """The error record must be found by the id its owner knows."""
    parsed = parse_record(record, 3)
    assert isinstance(parsed, BadLine)
    assert (parsed.custom_id, parsed.conversation) == (custom_id, conversation)


CHAT = '"messages": [{"role": "user", "content": "hi"}]'


@table(
    "data, sentence",
    [
        (f'{{{CHAT}, "reward": NaN, "a": [{{"b": -Infinity}}]}}', None),
        (f'{{{CHAT}, "metadata": {{"loss": NaN}}}}', None),
        ('{"prompt": "hi", "reward": NaN}', None),
        (f'{{{CHAT}, "temperature": NaN}}', "temperature is nan; expected a number"),
        (f'{{{CHAT}, "tools": [{{"name": "f", "parameters": {{"a": NaN}}}}]}}', '"tools" holds NaN or Infinity'),
        ('{"messages": [{"role": "user", "content": NaN}]}', "messages[0].content is nan; expected a string"),
        (f'{{"custom_id": "a", "body": {{{CHAT}, "seed": NaN}}}}', "body.seed is nan; expected an integer"),
        ('{"a": NaN}', 'not valid JSON: "a" holds NaN or Infinity'),
        ('{"messages": [], "reward": NaN}', "messages is empty"),
        (f'{{{CHAT}, "reward": NaN', "not valid JSON: "),
        (f'{{{CHAT}, "reward": Nan}}', "not valid JSON: "),
    ],
)
def test_nan_is_taken_only_where_nothing_reads_it(data: str, sentence: str | None) -> None:
    """Fault: pandas' NaN in a column of rewards refuses the line; one in a setting passes; or no key is named."""
    parsed = parse_line(data.encode(), 1)
    assert isinstance(parsed, Conversation) if sentence is None else sentence in parsed.error.message  # type: ignore[union-attr]


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
            parsed = parse_record(record, 1, LineOptions(wanted))  # type: ignore[arg-type]
            if name == wanted:
                assert isinstance(parsed, Conversation) and parsed.source_format == name
            else:
                assert isinstance(parsed, BadLine)
                assert parsed.error.message.startswith(f"a line of the format {wanted} needs ")


@table("data", [b"{", b'{"messages": [}', b"\xff\xfe{}", b"{} {}", b'"\\ud800"', b"[" * 100_000])
def test_what_is_not_json_is_told_with_the_column(data: bytes) -> None:
    """Torn lines, other encodings, JavaScript's NaN, lone surrogates and absurd nesting end one line each."""
    parsed = parse_line(data, 4)
    assert isinstance(parsed, BadLine)
    assert (parsed.error.code, parsed.error.line, parsed.custom_id) == ("invalid_json", 4, None)
    assert re.match(r"not valid JSON: .* at column [1-9]", parsed.error.message)


def test_a_byte_that_is_not_utf_8_is_told_with_its_column() -> None:
    """Fault: the message is about a surrogate at column 1, and neither is in the line."""
    parsed = parse_line('{"messages": "é'.encode() + b'\xff"}', 4)
    assert isinstance(parsed, BadLine)
    assert parsed.error.message == "not valid JSON: expected UTF-8, and not the byte 0xff at column 16"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
ROLE = st.sampled_from(["system", "user", "assistant", "tool", "developer", "bot"])
MESSAGE = JSON | st.fixed_dictionaries(
    {"role": ROLE | JSON},
    optional={
        "content": st.text(max_size=5) | JSON,
        "tool_calls": st.lists(
            JSON | st.fixed_dictionaries({"function": JSON | st.fixed_dictionaries({"name": JSON, "arguments": JSON})})
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
        **{key: JSON for key in ("max_tokens", "top_p", "n", "stop", "logprobs", "tools", "tool_choice", "top_k")},
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
            st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "function_call", "x"]), "value": JSON})
        ),
        "system": JSON,
        **{key: JSON for key in ("model", "max_tokens", "seed", "n", "stop", "response_format", "temprature", "score")},
    },
)


@pytest.mark.slow
@settings(max_examples=tries(600))
@given(record=LINE | JSON, wanted=st.sampled_from([None, *FORMATS]))
def test_any_json_becomes_a_conversation_or_a_bad_line(record: object, wanted: Any) -> None:
    """An exception out of a line would end the job, or lose the line."""
    parsed = parse_line(json.dumps(record).encode(), 1, LineOptions(wanted))
    assert isinstance(parsed, (Conversation, BadLine))
    if isinstance(parsed, BadLine):
        assert parsed.error.code in ("invalid_json", "invalid_request") and "\n" not in parsed.error.message
    else:
        assert parsed.messages or parsed.prompt
        assert all(isinstance(message["content"], str) for message in parsed.messages)
        orjson.dumps(parsed.params)


@settings(max_examples=tries(500))
@given(st.binary(max_size=40))
def test_any_bytes_become_a_conversation_or_a_bad_line(data: bytes) -> None:
    """A line may hold anything."""
    assert isinstance(parse_line(data, 1), (Conversation, BadLine))
