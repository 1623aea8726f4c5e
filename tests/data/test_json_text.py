"""Numbers keep their value wherever JSON is read and written: what comes is what `json.loads` gives."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.template_child import Template
from apcbatch.data.conversation import Conversation
from apcbatch.data.input.records import parse_line
from apcbatch.data.input.source import open_source
from apcbatch.data.json_text import read_json, write_json
from apcbatch.data.output.parser import OutputParser
from apcbatch.data.output.tool_parsers import tool_parsers
from tests.data.conftest import by_transformers
from tests.data.families import TEMPLATES, parser_name, written_by_the_assistant
from tests.effort import table
from tests.fuzz.mutate import number_text

ARGUMENTS_TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<{{ message.role }}>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}"
    "{{ call.function.arguments }}{% endfor %}{% endfor %}{{ documents | tojson }}{{ limit }}"
)


def seeded() -> random.Random:
    """A fresh seed, in the output of a test that fails."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    return random.Random(seed)


def object_text(draw: random.Random) -> str:
    """An object with numbers here and there, as text."""
    numbers = [number_text(draw) for _ in range(4)]
    return f'{{"a": {numbers[0]}, "b": [{numbers[1]}, {{"c": {numbers[2]}}}], "{numbers[3]}": "{numbers[3]}"}}'


def test_numbers_are_those_of_python() -> None:
    """Fault: an integer beyond 64 bits that becomes a float, or a number beyond the floats that is no JSON."""
    draw = seeded()
    for _ in range(3000):
        text = object_text(draw)
        for given in (text, text.encode()):
            assert repr(read_json(given)) == repr(json.loads(text))  # which tells 1 from 1.0, and -0.0 from 0.0
        value = json.loads(text)
        if "inf" in repr(value):
            with pytest.raises(ValueError, match="not JSON compliant"):
                write_json(value)
        else:
            assert repr(json.loads(write_json(value))) == repr(value)


@pytest.mark.parametrize(("text", "reason"), [
    (b'{"a": ' + b"9" * 4301 + b"}", "an integer of more than 4,300 digits"),
    (b'[1e400, "\\ud800"]', "half of a surrogate pair"),
    (b"[1e400, NaN]", "NaN is no number"), (b'[1e400, "\xff"]', "not valid UTF-8"),
    (b"[1e400,]", "Expecting value|Illegal trailing comma"),
    pytest.param(b"[" * 1010 + b"1" * 30 + b"]" * 1010, "nested too deeply",
        marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="json nests as deep as orjson there")),
])  # fmt: skip
def test_beyond_json_is_an_error(text: bytes, reason: str) -> None:
    """Fault: what Python's library takes beyond JSON passes where a number made it read the text, or raises another
    exception than every reader expects."""
    with pytest.raises(json.JSONDecodeError, match=reason) as caught:
        read_json(text)
    if reason in ("half of a surrogate pair", "nested too deeply", "NaN is no number"):
        assert caught.value.colno == 1, "no place is known, so it is the beginning"


def test_an_integer_with_too_many_digits_is_pointed_at() -> None:
    """Fault: the error names the beginning of the line, or an integer that has as many digits as may be."""
    with pytest.raises(json.JSONDecodeError) as caught:
        read_json(b"[" + b"1" * 4300 + b", " + b"9" * 4301 + b"]")
    assert caught.value.pos == 4303


@table("value", [[float("inf")], {"a": [None, float("nan")]}, [2**70, float("inf")], ["\ud800"], [2**70, "\ud800"]])
def test_what_json_has_no_form_of_is_not_written(value: object) -> None:
    """Fault: a number that is not finite written as null."""
    with pytest.raises(ValueError):  # noqa: PT011
        write_json(value)


def test_nulls_beside_numbers_are_written() -> None:
    """Fault: the check for numbers that are not finite refuses the nulls that are there."""
    assert write_json({"a": None, "b": "null", "c": 1e22}) == '{"a":null,"b":"null","c":1e+22}'
    assert write_json([None, 10**30]) == f"[null,{10**30}]"


def line_text(draw: random.Random, number: int) -> str:
    """A line of some shape with numbers wherever a template may show them."""
    as_text, schema = json.dumps(object_text(draw)), object_text(draw)
    function = f'{{"name": "f", "parameters": {{"type": "object", "properties": {{}}, "x-note": {schema}}}}}'
    calls = ", ".join(
        f'{{"type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}'
        for arguments in (object_text(draw), as_text)
    )
    messages = (
        '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": ['
        + calls
        + ']}, {"role": "tool", "content": "1e400"}, {"role": "user", "content": "so?"}]'
    )
    body = (
        f'"messages": {messages}, "tools": [{{"type": "function", "function": {function}}}], '
        f'"documents": [{object_text(draw)}]'
    )
    limit = draw.choice(("12345678901234567890123", "9007199254740993", "-18446744073709551616", "1.0", "0.1"))
    body += f', "chat_template_kwargs": {{"limit": {limit}}}'
    if number % 2:
        return f'{{"id": "c{number}", {body}}}'
    body = f'{{"custom_id": "c{number}", "method": "POST", "url": "/v1/chat/completions", "body": {{{body}}}}}'
    return body


def test_prompts_are_those_of_transformers(model_dir: Callable[..., Path]) -> None:
    """Fault: a recorded argument 12345678901234567890123 that the prompt has as 1.2345678901234568e+22."""
    draw, folder = seeded(), model_dir("gpt2", ARGUMENTS_TEMPLATE)
    renderer, theirs = Renderer.load(folder), by_transformers(folder)
    for number in range(150):
        line = line_text(draw, number)
        parsed = parse_line(line.encode(), 1)
        assert isinstance(parsed, Conversation), parsed
        record = json.loads(line)
        record = record.get("body", record)
        messages = record["messages"]
        call = messages[1]["tool_calls"][1]["function"]
        call["arguments"] = json.loads(call["arguments"])
        expected = theirs.apply_chat_template(
            messages, tools=record["tools"], documents=record["documents"], tokenize=False,
            **record["chat_template_kwargs"],
        )  # fmt: skip
        assert renderer.render_text(parsed, parsed.messages) == expected, line


def test_json_text_in_columns(tmp_path: Path) -> None:
    """Fault: numbers of a table's JSON columns, or of sharegpt's tools, that go through floats."""
    wide = '{"n": 12345678901234567890123, "m": 1e400}'
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {wide}}}}}]'
    call = f'{{"name": "f", "arguments": {wide}}}'
    spoken = [{"from": "human", "value": "hi"}, {"from": "function_call", "value": call}]
    messages = (
        '[{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": '
        f'[{{"type": "function", "function": {call}}}]}}]'
    )
    pq.write_table(pa.table({"messages": [messages], "tools": [tools]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps({"conversations": spoken, "tools": tools}) + "\n")
    for name in ("a.parquet", "b.jsonl"):
        [record] = open_source(str(tmp_path / name))
        assert isinstance(record, Conversation), record
        assert record.tools == json.loads(tools)
        assert record.messages[1]["tool_calls"][0]["function"] == json.loads(call)


@table("template", TEMPLATES)
def test_generated_calls_keep_their_numbers(template: str) -> None:
    """Fault: a generated argument that loses digits, in the record or in the next turn of a rollout."""
    draw, compiled = seeded(), Template(TEMPLATES[template], {})
    types = {"a": {"type": "number"}, "b": {"type": "array"}, "c": {"type": "integer"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": types}}}]
    for _ in range(40):
        wanted = {"a": 1.5, "b": [0], "c": draw.choice((1, -1)) * draw.randrange(10**30)}
        while "inf" in repr(found := json.loads(object_text(draw))):
            pass
        wanted |= {"a": found["a"], "b": found["b"]}
        function = {"name": "f", "arguments": wanted}
        message = {"role": "assistant", "content": "", "tool_calls": [{"id": "a" * 9, "function": function}]}
        _, text = compiled.answer(1, [message], None)
        [written] = written_by_the_assistant(text)
        answer = OutputParser(tool_parsers()[parser_name(template)], tools).parse(written)
        [call] = answer.as_message()["tool_calls"]
        [given] = answer.as_output()["tool_calls"]
        assert repr(call["function"]["arguments"]) == repr(wanted), written
        assert repr(json.loads(given["function"]["arguments"])) == repr(wanted)
