"""The same conversations from JSON lines, tables and what `to_json` makes of tables give the same prompts."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from apcbatch.data.chat.render import Renderer
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.input.records import parse_line
from apcbatch.data.input.source import open_source
from apcbatch.data.input.tables import _allows_null, _as_required, _schemas, nulls_taken, settle_line
from apcbatch.model.locate import locate_model
from tests.effort import table

STRING, MAYBE = {"type": "string"}, {"type": ["string", "null"]}
TOOLS = [
    ("find", {"city": STRING, "day": MAYBE, "note": STRING, "stars": STRING}, ["city", "day"]),
    ("book", {"note": STRING, "order": STRING, "seat": MAYBE}, ["order"]),
    ("stop", {}, []),
    ("pay", {"note": STRING, "card": STRING, "order": STRING}, ["card", "order"]),
]


def tool(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": parameters}}


def call(number: int, name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """A call and its answer."""
    one = {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [one]},
        {"role": "tool", "content": "done", "tool_call_id": f"c{number}"},
    ]


ROWS = [
    {"id": "a",
     "messages": [{"role": "user", "content": "Go."}, *call(1, "find", {"city": "Rome", "day": None}),
         *call(2, "find", {"city": "Oslo", "day": "Monday", "stars": "4"}),
         *call(3, "book", {"order": "7", "seat": None}), *call(4, "stop", {})],
     "tools": [tool(*one) for one in TOOLS[:3]]},
    {"id": "b", "messages": [{"role": "user", "content": "Pay."}, *call(1, "pay", {"card": "x", "order": "7"})],
     "tools": [tool(*one) for one in (TOOLS[3], TOOLS[0])]},
    {"id": "c", "messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]},
]  # fmt: skip


def forms(folder: Path, rows: list[dict[str, Any]], **how: Any) -> dict[str, str]:
    """The rows as JSON lines, and as `datasets` writes them: each form's name and its input."""
    from datasets import Dataset

    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.json").write_text(json.dumps(rows, indent=2))
    dataset = Dataset.from_list(copy.deepcopy(rows), **how)
    dataset.to_parquet(folder / "rows.parquet")
    dataset.to_json(folder / "table.jsonl")
    dataset.to_json(folder / "table.json", lines=False, batch_size=len(rows))
    dataset.save_to_disk(folder / "saved")
    names = ("rows.jsonl", "rows.json", "rows.parquet", "table.jsonl", "table.json", "saved")
    return {name: str(folder / name) for name in names}


def contents(spec: str) -> list[Any]:
    """What the prompts of an input are made from; the keys of objects in order."""
    records = list(open_source(spec))
    assert all(isinstance(record, Conversation) for record in records), records
    return [json.dumps([record.id, record.messages, record.tools]) for record in records]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(locate_model("demo"))


def prompts(spec: str, renderer: Renderer) -> list[list[int]]:
    """The token ids of every prompt."""
    rendered = [renderer.render(record) for record in open_source(spec) if not isinstance(record, BadLine)]
    assert not any(one.failures for one in rendered)
    return [prompt.token_ids.tolist() for one in rendered for prompt in one.prompts]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"on_mixed_types": "use_json"}])
def test_each_form_gives_the_same_prompts(tmp_path: Path, renderer: Renderer, how: dict[str, Any]) -> None:
    """Catches nulls of a table that become arguments, a null argument that is lost, parameters in a table's order."""
    rows = copy.deepcopy(ROWS)
    if how:  # a column that no struct can hold is of the type Json
        rows[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["card"] = 5
    inputs = forms(tmp_path, rows, **how)
    expected = prompts(inputs["rows.jsonl"], renderer)
    assert len(expected) == 8
    for name, spec in inputs.items():
        assert contents(spec) == contents(inputs["rows.jsonl"]), name
        assert prompts(spec, renderer) == expected, name
    first = next(iter(open_source(inputs["saved"])))
    assert isinstance(first, Conversation)
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome", "day": None}
    assert first.messages[5]["tool_calls"][0]["function"]["arguments"] == {"order": "7", "seat": None}
    assert first.messages[7]["tool_calls"][0]["function"]["arguments"] == {}


def test_an_argument_that_is_null_in_the_whole_table_was_given(tmp_path: Path) -> None:
    """Catches a column that is there only because a call has this null, taken for one that the table has put in."""
    properties = {"city": STRING, "day": STRING}
    messages = [{"role": "user", "content": "Go."}, *call(1, "find", {"city": "Rome", "day": None})]
    rows = [{"id": "a", "messages": messages, "tools": [tool("find", properties, [])]}]
    inputs = forms(tmp_path, rows)
    assert contents(inputs["rows.parquet"]) == contents(inputs["saved"]) == contents(inputs["rows.jsonl"])


@table("arguments", [
    [{"a": 1, "b": None}], [{"a": 1, "b": None}, {"a": None, "b": 1}], [{"a": None}, {"b": None}], [{"a": {"b": None}}],
])  # fmt: skip
@table("nested", [False, True])
def test_a_json_line_keeps_its_nulls(arguments: list[dict[str, Any]], nested: bool) -> None:
    """Catches a line that no table made, and that loses arguments or the nulls of its tools."""
    messages = [{"role": "user", "content": "Go."}]
    for number, one in enumerate(arguments):
        messages += call(number, "find", one)
    schema = tool("find", {"a": {"type": "string", "default": None, "enum": ["x", None]}}, [])
    line: dict[str, Any] = {"messages": messages, "tools": [schema]}
    line = {"custom_id": "x", "body": line} if nested else line
    before = json.dumps(line)
    assert settle_line(line) is line and json.dumps(line) == before


def test_uniform_messages_with_arguments_of_their_own_keep_their_nulls() -> None:
    """Catches the dump of a message class, each with all its fields, that is taken for a table."""
    keys = ("role", "content", "tool_calls", "tool_call_id")
    messages = [{"role": "user", "content": "Go."}, *call(1, "find", {"a": None}), *call(2, "book", {"b": None})]
    line = {"messages": [{key: message.get(key) for key in keys} for message in messages]}
    assert settle_line(line) is line


def test_required_names_without_a_property_leave_the_order_to_the_others() -> None:
    """Catches a schema that requires what it does not describe, and ends the line."""
    properties = {"b": STRING, "x": MAYBE, "a": STRING}
    assert list(_as_required(properties, ["a", "missing", ["b"], "b"])) == ["a", "x", "b"]
    assert list(_as_required(properties, ["a", "b", "a"])) == ["b", "x", "a"]


def test_nesting_as_deep_as_json_allows_is_no_crash() -> None:
    """Catches a line that ends the run because looking for nulls goes down with it."""
    deep: Any = None
    for _ in range(1000):
        deep = {"a": deep}
    line = {"messages": [{"role": "user", "content": "x"}], "tools": [deep]}
    assert settle_line(line) is line


@pytest.mark.slow
def test_any_dataset_comes_back(tmp_path: Path) -> None:
    """Random calls of random tools: a null that is required or allowed stays, all others were not there."""
    draw = random
    names = [f"p{number}" for number in range(6)]
    tools = []
    for number in range(4):
        chosen = [name for name in names if draw.random() < 0.6]
        optional_null = {name: draw.choice((STRING, {"anyOf": [STRING, {"type": "null"}]})) for name in chosen}
        required = [name for name in chosen if draw.random() < 0.5 or optional_null[name] is not STRING]
        tools.append((f"t{number}", optional_null, required))
    rows = []
    for number in range(12):
        used = draw.sample(tools, draw.randint(2, 4))
        messages = [{"role": "user", "content": "Go."}]
        for step in range(draw.randint(1, 5)):
            name, properties, required = draw.choice(used)
            given = {
                key: None if key in required and draw.random() < 0.4 else draw.choice("xyz")
                for key in properties
                if key in required or draw.random() < 0.5
            }
            messages += call(step, name, given)
        rows.append({"id": str(number), "messages": messages, "tools": [tool(*one) for one in used]})
    rows.append(
        {"id": "all", "messages": [{"role": "user", "content": "."}, *call(0, "t0", dict.fromkeys(names, "x"))]}
    )
    inputs = forms(tmp_path, rows)
    expected = contents(inputs["rows.jsonl"])
    for name in ("rows.parquet", "table.jsonl", "table.json", "saved"):
        assert list(map(unordered, contents(inputs[name]))) == list(map(unordered, expected)), name


def unordered(content: str) -> str:
    """The same with the keys of all objects sorted: the order of optional parameters is not in a table."""
    return json.dumps(json.loads(content), sort_keys=True)


@table("nested", [False, True])
def test_nulls_of_a_table_go_from_a_line_and_from_a_body(nested: bool) -> None:
    """Catches requests that went through a table as lines of a batch, with arguments that were not given."""
    keys = ("role", "content", "tool_calls", "tool_call_id")
    messages = [{"role": "user", "content": "Go."}, *call(1, "find", {"a": None, "b": "x"})]
    line: dict[str, Any] = {"messages": [{key: message.get(key) for key in keys} for message in messages]}
    settled = settle_line({"custom_id": "x", "body": line} if nested else line)
    found = (settled["body"] if nested else settled)["messages"]
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {"b": "x"}
    assert list(found[0]) == ["role", "content"] and list(found[2]) == ["role", "content", "tool_call_id"]


def test_calls_that_are_null_in_answers_alone_are_no_tables_work() -> None:
    """Catches a line whose messages were made alike by hand, and that loses an argument: a table fills in the messages
    of users too."""
    messages = [{"role": "user", "content": "Go.", "tool_calls": []}, *call(1, "find", {"a": None})[:1]]
    messages.append({"role": "assistant", "content": "Done.", "tool_calls": None})
    line = {"messages": messages}
    assert settle_line(line) is line
    messages[0]["tool_calls"] = None
    assert settle_line(line) is not line, "as a table does"


def function(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}, **more}}


@table(
    "tools, taken",
    [
        ([function("f", {"b": STRING, "a": STRING}, strict=None)], None),
        ([function("f", {"b": STRING}, description=None), function("g", {"a": STRING}, description="x")], None),
        ([function("f", {"b": STRING}, strict=None), function("g", {"b": STRING})], None),
        ([function("f", {"b": STRING}, strict=None), function("g", {"b": STRING}, strict=None)], None),
        ([function("f", {"b": {"type": "string", "default": None, "enum": [None]}})], None),
        ([5, function("f", {"b": None})], None),
        ([function("f", {"b": STRING, "a": None})], ["a"]),
        ([function("f", {"b": STRING}, description=None), function("g", {"b": STRING}, description="x")],
         ["description"]),
        ([function("f", {"b": {"type": "array", "items": None}}), function("g", {"b": MAYBE | {"items": STRING}})],
         ["items"]),
    ],
)  # fmt: skip
def test_a_null_of_tools_is_a_tables_where_another_tool_has_the_key(tools: list[Any], taken: list[str] | None) -> None:
    """Fault: a dump of a class, with `strict` and `description` null, loses keys and the order of its properties; or a
    table's nulls go without a word."""
    line = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    settled = settle_line(line)
    assert (None if settled is line else list(nulls_taken(line, settled))) == taken
    if taken is not None:
        record = parse_line(json.dumps(line).encode(), 1)
        assert isinstance(record, Conversation)
        assert record.warnings == (f'nulls are taken out, as a table put them in: "{taken[0]}"',)


@table(
    "schema, expected",
    [
        ({"type": "null"}, True), ({"type": ["string", "null"]}, True), ({"type": "string", "nullable": True}, True),
        ({"anyOf": [STRING, {"type": "null"}]}, True), ({"oneOf": [{"anyOf": [{"type": "null"}]}]}, True),
        ({}, False), (STRING, False), ({"type": ["string"]}, False), ({"nullable": "yes"}, False),
        ({"anyOf": 5}, False), (None, False), ("null", False),
    ],
)  # fmt: skip
def test_a_schema_allows_null_where_it_says_so(schema: object, expected: bool) -> None:
    """Catches a null argument that is dropped although its schema allows it, or kept although it does not."""
    assert _allows_null(schema) is expected


def test_the_schemas_of_tools_are_found_by_name() -> None:
    """Catches a tool of another shape that ends the line, and one without a name whose schema another gets."""
    flat = {"name": "f", "input_schema": {"type": "object"}}
    tools = [{"function": {}}, {"function": {"name": 5}}, {"function": 5}, 7, flat, {"function": {"name": "g"}}]
    assert _schemas({"tools": tools[:4], "body": {"tools": tools[4:]}}) == {"f": {"type": "object"}, "g": {}}
    assert _schemas({"tools": 5, "body": []}) == {}
