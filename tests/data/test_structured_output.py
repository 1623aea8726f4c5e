"""The form that a record asks for: every shape of it, and what is none."""

from __future__ import annotations

import json
import math

import pytest

from apcbatch.data.grammar.structured_output import WHITESPACE, StructuredOutput, check_structured_output
from apcbatch.errors import RequestError
from tests.data.conftest import batch, fault, good
from tests.effort import table

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}, "required": ["z"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
    {"name": "bare", "parameters": {"properties": {}}},
]
NAMED = {"type": "function", "function": {"name": "look_up"}}
GIVEN = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None, "tool_choice": None}, None),
    ({"guided_regex": "", "guided_choice": [], "guided_grammar": "", "guided_json": {}, "structured_outputs": {}},
     None),
    ({"tool_choice": "auto"}, None), ({"tool_choice": "none"}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutput("json", '{"type":"object"}')),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, StructuredOutput("json", TEXT)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
     StructuredOutput("json", TEXT)),
    ({"guided_json": SCHEMA}, StructuredOutput("json", TEXT)),
    ({"guided_json": json.dumps(SCHEMA)}, StructuredOutput("json", TEXT)),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, StructuredOutput("json", TEXT, " ?")),
    ({"guided_regex": "a+"}, StructuredOutput("regex", "a+")),
    ({"guided_choice": ["yes", "no"]}, StructuredOutput("choice", '["yes","no"]')),
    ({"guided_grammar": 'start: "a"'}, StructuredOutput("grammar", 'start: "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput("json", TEXT)),
    ({"structured_outputs": {"json": {}}}, StructuredOutput("json", "{}")),
    ({"structured_outputs": {"json_object": True}}, StructuredOutput("json", '{"type":"object"}')),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, StructuredOutput("json", TEXT, "")),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, StructuredOutput("json", TEXT, " ")),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ", "disable_any_whitespace": True}},
     StructuredOutput("json", TEXT, "")),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ", "disable_any_whitespace": False}},
     StructuredOutput("json", TEXT, " ")),
    ({"structured_outputs": {"regex": "a", "choice": None}}, StructuredOutput("regex", "a")),
    ({"tool_choice": "required"},
     StructuredOutput("calls",
         f'[["look_up",{TEXT}],["stop",{{"type":"object"}}],["bare",{{"type":"object","properties":{{}}}}]]')),
    *(
        ({"tool_choice": NAMED} | more, StructuredOutput("calls", f'[["look_up",{TEXT}]]', one_call=True))
        for more in ({}, {"parallel_tool_calls": False})
    ),
]  # fmt: skip


@table("record, expected", GIVEN)
def test_every_shape_is_read(record, expected):
    """Fault: a form that is not applied, keys in another order than the schema's, a text taken for another kind."""
    assert check_structured_output(record, TOOLS) == expected


REFUSED = [
    ({"response_format": "json"}, 'response_format is "json"; expected an object with the type text, json_object or'),
    ({"response_format": {}}, "response_format.type is missing"),
    ({"response_format": {"type": "xml"}}, 'response_format.type is "xml"; expected text, json_object or json_schema'),
    ({"response_format": {"type": "text", "schema": {}}}, 'response_format has the field "schema"'),
    ({"response_format": {"type": "json_object", "strict": True}}, 'response_format has the field "strict"'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}},
     'response_format has the field "schema"'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema.schema is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
     'json_schema.strict is "yes"; expected true or false'),
    ({"guided_json": "{"}, 'guided_json is "{"; expected a JSON schema, as an object or as JSON text'),
    ({"guided_json": [1]}, "guided_json is a list; expected a JSON schema"),
    ({"guided_json": {"const": math.nan, "enum": [None]}}, "guided_json cannot be written as JSON: "),
    ({"guided_json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
    ({"guided_regex": 3}, "guided_regex is 3; expected a regular expression"),
    ({"guided_choice": ["a", 3]}, "guided_choice is a list; expected a list of different texts"),
    ({"guided_choice": ["a", "a"]}, "guided_choice has the same text twice"),
    ({"guided_choice": [""]}, "that are not empty"),
    ({"structured_outputs": {"structural_tag": "x"}}, 'structured_outputs has the field "structural_tag"'),
    ({"structured_outputs": {"regex": "a", "x": 1}},
     "its fields are json, regex, choice, grammar, json_object, whitespace_pattern, disable_any_whitespace"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": True}},
     "structured_outputs.whitespace_pattern is true; expected a string"),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": " "}},
     'structured_outputs.disable_any_whitespace is " "; expected true or false'),
    ({"structured_outputs": ["json"]}, "structured_outputs is a list; expected an object"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice ask for different forms"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex and structured_outputs.choice"),
    ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex and tool_choice ask for different forms"),
    ({"tool_choice": "always"}, 'tool_choice is "always"; expected none, auto, required or'),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice is an object of another kind"),
    ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, 'names "fly", which is none of the tools'),
    ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name is missing"),
    ({"tool_choice": {**NAMED, "function": {"name": "look_up", "strict": True}}}, 'function has the field "strict"'),
    ({"tool_choice": {**NAMED, "strict": True}}, 'tool_choice has the field "strict", which is not supported'),
]  # fmt: skip


@table("record, words", REFUSED)
def test_what_is_no_form_is_refused(record, words):
    """Fault: half of a form is applied, or none of it, without a word."""
    with pytest.raises(RequestError) as caught:
        check_structured_output(record, TOOLS)
    assert words in caught.value.message and caught.value.code == "invalid_request"


@table("tools, words", [
    (None, "there are no tools"), ([], "there are no tools"),
    *(([{"type": "function", "function": {"name": name}}], "no tool has a name") for name in ("", 3, None, ["f"])),
    *(([{"function": {"name": "f", "parameters": parameters}}], 'the tool "f"')
      for parameters in ({"type": "string"}, {"type": ["object", "null"]}, [1], {"x-guidance": {}})),
])  # fmt: skip
def test_a_call_cannot_be_forced_without_tools(tools, words):
    """Fault: `required` without tools, names or parameters that are an object gives a text, a grammar of nothing, or
    arguments that no client reads."""
    with pytest.raises(RequestError, match=words):
        check_structured_output({"tool_choice": "required"}, tools)


def test_eight_names_are_shown_and_no_more() -> None:
    """Fault: a sentence with the names of a thousand tools, or of all keys of one."""
    names = [f"f{number}" for number in range(9)]
    choice = {"type": "function", "function": {"name": "g"}}
    with pytest.raises(RequestError, match=r'none of the tools: "f0", .*"f6", "f7"$'):
        check_structured_output({"tool_choice": choice}, [{"name": name} for name in names])
    with pytest.raises(RequestError, match=r'\(they have "f0", .*"f6", "f7"\); give properties'):
        check_structured_output({"tool_choice": "required"}, [{"name": "g", "parameters": dict.fromkeys(names, 1)}])


def test_bodies_and_lines_alike():
    """Fault: a form in a body that is ignored beside messages, or the other way round."""
    expected = {"structure": StructuredOutput("regex", "a+", WHITESPACE)}
    message = {"role": "user", "content": "hi"}
    assert good(batch({"messages": [message], "guided_regex": "a+"})).params == expected
    assert good({"messages": [message], "guided_regex": "a+"}).params == expected
    assert good({"conversations": [{"from": "human", "value": "hi"}], "guided_regex": "a+"}).params == expected
    completion = batch({"prompt": "hi", "guided_regex": "a+"}, url="/v1/completions")
    assert good(completion).params == expected
    assert good({"messages": [message]}).params == {}
    assert fault(batch({"messages": [message], "guided_regex": 1})).startswith("body.guided_regex is 1; expected")


def test_its_text_in_a_digest_is_that_of_earlier_versions() -> None:
    """Catches a renamed class, with which --resume answers every request with structured output again."""
    text = r"Structure(kind='regex', text='a+', whitespace=' |\\n[ \\t]{0,20}', one_call=False)"
    assert repr(StructuredOutput("regex", "a+")) == text
