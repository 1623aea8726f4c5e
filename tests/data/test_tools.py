"""Tools of every shape: brought into the form that templates read, refused by name, or named in a warning."""

from __future__ import annotations

import json
from typing import Any

from apcbatch.data.grammar.structured_output import check_structured_output
from apcbatch.data.input.messages import ContentWarnings
from apcbatch.data.input.tools import check_tools
from tests.data.conftest import USER, batch, fault, good
from tests.effort import table

SCHEMA = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
OPENAI = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
ALONE = {"name": "f", "description": "d"}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "OpenAI": (OPENAI, OPENAI),
    "without a type": ({"function": OPENAI["function"]}, {"function": OPENAI["function"]}),
    "the function alone": ({**ALONE, "parameters": SCHEMA}, {**ALONE, "parameters": SCHEMA}),
    "a name alone": ({"name": "f"}, {"name": "f"}),
    "Responses": ({"type": "function", **ALONE, "parameters": SCHEMA}, OPENAI),
    "Anthropic": ({**ALONE, "input_schema": SCHEMA}, OPENAI),
    "Anthropic, typed": (
        {"type": "custom", **ALONE, "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
        OPENAI,
    ),
    "Anthropic within OpenAI": (
        {"type": "function", "function": {**ALONE, "parameters": None, "inputSchema": None, "input_schema": SCHEMA}},
        OPENAI,
    ),
    "MCP": ({**ALONE, "inputSchema": SCHEMA}, OPENAI),
}


@table("name", SHAPES)
def test_a_tool_of_each_shape(name: str) -> None:
    """Fault: a tool that the template shows in a shape that no model was trained on, or whose schema binds no call."""
    tool, expected = SHAPES[name]
    before = json.dumps(tool)
    lines = (
        {"messages": [USER], "tools": [tool]},
        batch({"messages": [USER], "tools": [tool]}),
        {"conversations": [{"from": "human", "value": "a"}], "tools": json.dumps([tool])},
    )
    for line in lines:
        conversation = good(line)
        assert json.dumps(conversation.tools) == json.dumps([expected])  # keys in their order too
        assert conversation.warnings == ()
    assert json.dumps(tool) == before
    structure = check_structured_output({"tool_choice": "required"}, check_tools([tool], "tools", ContentWarnings()))
    assert structure is not None
    assert json.loads(structure.text) == [["f", {"type": "object"} if name == "a name alone" else SCHEMA]]


FOREIGN = [
    ({"foo": 1}, 'tools[0] has no name; its keys are "foo"; give it as {"type": "function"'),
    ({}, "tools[0] has no name; its keys are none; give it as"),
    ({"functionDeclarations": [ALONE]}, 'tools[0] has no name; its keys are "functionDeclarations"'),
    ({"toolSpec": ALONE}, 'tools[0] has no name; its keys are "toolSpec"'),
    (
        {"type": "web_search_preview"},
        'tools[0].type is "web_search_preview"; expected "function": a tool that a service',
    ),
    ({"type": "custom", "custom": {"name": "f"}}, 'tools[0].type is "custom"; expected "function": a tool that'),
    ({"type": "custom", "name": "f", "format": {"type": "text"}}, 'tools[0].type is "custom"; expected "function"'),
    ({"type": "bash_20250124", "name": "bash"}, 'tools[0].type is "bash_20250124"; expected "function"'),
    ({"type": 1, "name": "f"}, 'tools[0].type is 1; expected "function"'),
    ({"type": "custom", "function": {"name": "f"}}, 'tools[0].type is "custom"; expected "function"'),
    ({"name": 5}, "tools[0].name is 5; expected a string"),
    ({"name": "f", "input_schema": "x"}, 'tools[0].input_schema is "x"; expected a JSON schema: an object'),
    (
        {"function": {"name": "f", "parameters": SCHEMA, "input_schema": {}}},
        "tools[0].function has the schemas parameters and input_schema; give one of them",
    ),
]


@table("tool, sentence", FOREIGN)
def test_a_tool_that_cannot_be_called_is_refused_by_name(tool: Any, sentence: str) -> None:
    """Fault: what a service runs, or nobody knows, is shown to the model without a word."""
    assert fault({"messages": [USER], "tools": [tool]}).startswith(sentence)
    assert fault(batch({"messages": [USER], "tools": [tool]})).startswith(f"body.{sentence}")


def test_a_misspelt_schema_is_said() -> None:
    """Fault: `paramters` binds no call, without a warning."""
    for tool, where in (
        ({"name": "f", "paramters": SCHEMA}, "tools[0]"),
        ({"function": {"name": "f", "paramters": SCHEMA}}, "tools[0].function"),
    ):
        [sentence] = good({"messages": [USER], "tools": [tool]}).warnings
        assert sentence == f'{where} has no parameters; its keys "paramters" are not known as a schema'


@table("text", ['{"a": 1', "{'a': 1}", "[1]", "null"])
def test_recorded_arguments_that_are_no_object_are_said(text: str) -> None:
    """Fault: broken JSON in a recorded call that passes without a word."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": text}}] * 2
    conversation = good({"messages": [USER, {"role": "assistant", "tool_calls": calls}]})
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == text
    assert conversation.warnings == (
        "messages[1].tool_calls[0].function.arguments is no JSON text of an object; "
        "the template is given the text as it is",
    )


def test_a_spoken_call_that_is_none_is_said() -> None:
    """Fault: a broken function_call of a sharegpt line becomes a text without a word."""
    spoken = [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "f", "arguments": {'}]
    conversation = good({"conversations": spoken})
    assert conversation.messages[1] == {"role": "assistant", "content": spoken[1]["value"]}
    assert conversation.warnings == (
        "conversations[1].value is no tool call, an object with name and arguments; it is given as a text",
    )
