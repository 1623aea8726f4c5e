"""Parsers of tool calls: what each family writes is read back, and what is no call stays text."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.template_child import Template
from apcbatch.data.conversation import Conversation
from apcbatch.data.input.source import open_source
from apcbatch.data.output.tool_parser import Call
from apcbatch.data.output.tool_parsers import choose_tool_parser, tool_parsers
from apcbatch.formats import TOOL_PARSERS
from tests.data.conftest import build_tokenizer, by_transformers, save_model
from tests.data.families import TEMPLATES, parser_name, written_by_the_assistant
from tests.effort import table, tries

PARSERS = list(tool_parsers().values())
SCHEMA = {
    "type": "object",
    "properties": {"q": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"},
        "b": {"type": ["boolean", "null"]}, "o": {"type": "object"},
        "l": {"anyOf": [{"type": "array"}, {"type": "null"}]}, "e": {"enum": [1, 2]}},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]
UNTYPED: list[Any] = [None, 5, {}, {"properties": 5}, {"properties": {"n": [1]}}, {"properties": {"m": {}}}]
# One call of get with these arguments, as each family writes it.
ARGUMENTS = {"q": 'é {<>} "a"\nb', "n": 1}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "get", "arguments": {TEXT}}}\n</tool_call>',
    "jamba": f'<tool_calls>[\n    {{"name": "get", "arguments": {TEXT}}}\n]</tool_calls>',
    "qwen-coder": "<tool_call>\n<function=get>\n<parameter=q>\n" + str(ARGUMENTS["q"]) + "\n</parameter>\n"
    "<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "mistral": f'[TOOL_CALLS][{{"name": "get", "arguments": {TEXT}}}]',
    "llama3": f'<|python_tag|>{{"name": "get", "parameters": {TEXT}}}',
    "lfm2": f"<|tool_call_start|>[get(q={json.dumps(ARGUMENTS['q'], ensure_ascii=False)}, n=1)]<|tool_call_end|>",
    "granite": f'<|tool_call|>[{{"name": "get", "arguments": {TEXT}}}]',
    "nemotron": f'<TOOLCALL>[{{"name": "get", "arguments": {TEXT}}}]</TOOLCALL>',
}


def test_the_options_name_the_parsers_that_are_there() -> None:
    """Fault: a parser that no option names, or a name without a parser."""
    assert tuple(tool_parsers()) == TOOL_PARSERS == tuple(sorted(WRITTEN))


@table("name", WRITTEN)
def test_a_call_of_each_family_is_read(name: str) -> None:
    """Fault: the calls of a family are left in the text."""
    found = tool_parsers()[name].find("Let me see. " + WRITTEN[name], TOOLS)
    assert (found.content, found.calls, found.num_malformed) == ("Let me see. ", [Call("get", ARGUMENTS)], 0)


@table("name", WRITTEN)
def test_the_calls_of_another_family_are_text(name: str) -> None:
    """Fault: a parser that takes what its family does not write."""
    for other, text in WRITTEN.items():
        related = {name, other} == {"hermes", "qwen-coder"} or {name, other} == {"hermes", "granite"}
        if other != name and not related:
            found = tool_parsers()[name].find(text, TOOLS)
            assert (found.content, found.calls) == (text, [])


@table("name", TEMPLATES)
def test_the_template_tells_the_parser(name: str) -> None:
    """Fault: auto takes another family's parser, or two parsers claim one template."""
    assert [parser.name for parser in PARSERS if parser.detects(TEMPLATES[name])] == [parser_name(name)]
    chosen = choose_tool_parser("auto", "", TEMPLATES[name])
    assert chosen is not None and chosen.name == parser_name(name)
    first = choose_tool_parser("auto", '["\\\\s*<TOOLCALL>"]', TEMPLATES[name])
    assert first is not None and first.name == "nemotron", "what the checkpoint says of its answers comes first"


def test_a_template_after_that_of_qwen3_5_tells_the_parser() -> None:
    """Fault: the tools as JSON, the example of a call and the thoughts in one template make another parser claim it."""
    head = """{%- if tools %}{{- '<|start|>system\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '\\n</tools>\\n\\nReply in this format:\\n\\n' }}
{{- '<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n' }}
{{- '</function>\\n</tool_call>\\n\\n<IMPORTANT>\\nAn inner <function=...></function> block is needed\\n</IMPORTANT>' }}
{{- '<|stop|>\\n' }}{%- endif %}"""
    ends = "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}"
    template = head + TEMPLATES["qwen-coder"] + ends
    assert [parser.name for parser in PARSERS if parser.detects(template)] == ["qwen-coder"]


def test_a_name_and_none_win_over_the_template() -> None:
    """Fault: an option that does nothing."""
    assert choose_tool_parser("none", TEMPLATES["jamba"]) is None
    for name, parser in tool_parsers().items():
        assert choose_tool_parser(name, TEMPLATES["jamba"]) is parser
    chosen = choose_tool_parser("auto", "no word about calls")
    assert chosen is not None and chosen.name == "hermes"


def test_markers_among_the_added_tokens_choose_the_parser(tmp_path: Path) -> None:
    """Fault: LFM2.5's template shows no call, so that its calls are looked for as Hermes writes them, and their markers
    are left out of the text. A template that shows calls goes before the tokens."""
    tokenizer = build_tokenizer("chatml")
    tokenizer.add_special_tokens(["<|tool_call_start|>", "<|tool_call_end|>"])
    for template, name in (("{{ messages[0].content }}", "lfm2"), (TEMPLATES["jamba"], "jamba")):
        renderer = Renderer.load(save_model(tmp_path, tokenizer, template))
        assert renderer.tool_parser is not None and renderer.tool_parser.name == name
        text = "<|tool_call_start|>[f(a=1)]<|tool_call_end|>"
        assert (renderer.tokenizer.decode(tokenizer.encode(text).ids) == text) == (name == "lfm2")


@table("parser", PARSERS)
def test_the_syntax_of_a_parser_is_what_it_reads(parser: Any) -> None:
    """Fault: what a grammar forces is no call of the family."""
    syntax, calls = parser.syntax, [Call("get", {"n": 1, "q": "a"}), Call("get", {}), Call("get", {"q": "; ,"})]

    def arguments(values: dict[str, Any]) -> str:
        if syntax.arguments == "json":
            return json.dumps(values)
        return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())

    for made in (calls, calls[:1]):
        text = syntax.separator.join(
            f"{syntax.before_name}{call.name}{syntax.before_arguments}{arguments(call.arguments)}{syntax.after_arguments}"
            for call in made
        )
        found = parser.find(syntax.begin + text + syntax.end, TOOLS)
        assert (found.calls, found.content.strip(), found.num_malformed) == (made, "", 0)


@table(
    "name, text, calls",
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [Call("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [Call("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', [
            Call("f", {"a": "</tool_call>"})
        ]),
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', [Call("f", {}), Call("g", {})]),
        ("hermes", '<tool_call>{"id": "x1", "function": {"name": "f", "arguments": {}}}</tool_call>', [
            Call("f", {}, "x1")
        ]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', [Call("f", {"a": 1}), Call("g", {})]),
        ("mistral", '[TOOL_CALLS]f.g-h[CALL_ID]abcdefghi[ARGS]{"a": 1}', [Call("f.g-h", {"a": 1}, "abcdefghi")]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]', [Call("f", {}, "abcdefghi")]),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "arguments": {}}', [
            Call("f", {"a": 1}), Call("g", {})
        ]),
        ("granite", '<tool_call>[{"name": "f", "arguments": {}}]', [Call("f", {})]),
        ("lfm2", "<|tool_call_start|>[a.b-c(), g( x = 'it\\'s\\n\\q' , y=[True, null,-1.5e3, true],\n),"
         " h(z={\"k\": {}},)]<|tool_call_end|>", [
            Call("a.b-c", {}), Call("g", {"x": "it's\n\\q", "y": [True, None, -1500.0, True]}),
            Call("h", {"z": {"k": {}}}),
        ]),
        ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {"a": 1}}]<|tool_call_end|>', [Call("f", {"a": 1})]),
        ("lfm2", '<|tool_call_start|> {"name": "f"} <|tool_call_end|>', [Call("f", {})]),
        *(
            ("lfm2", f"<|tool_call_start|>[f(a={written})]<|tool_call_end|>", [Call("f", {"a": value})])
            for written, value in (
                ("(800, 600)", [800, 600]), ("(1,)", [1]), ("()", []), ("(5)", 5), ("([1], 'a')", [[1], "a"]),
                ('"""it\'s\n"x" """', 'it\'s\n"x" '), ("'''a\\tb'''", "a\tb"), ('""', ""),
                (r"r'C:\new'", r"C:\new"), ("'a' 'b'\n\"c\"", "abc"), ("(\"a\"\n r'\\n')", "a\\n"),
                (r"'\x41\u00e9\U0010ffff\U00110000'", "Aé\U0010ffff\\U00110000"),
                ("1_000", 1000), ("+5", 5), (".5", 0.5), ("-.5e-1", -0.05), ("5.", 5.0), ("+1_0.2_5", 10.25),
                ("{1: 'a', 'b': {-2: ()}}", {"1": "a", "b": {"-2": []}}), (f"[{'[], ' * 101}]", [[]] * 101),
            )
        ),
        ("hermes", '<tool_call>\n{"name": "f"}\n{"name": "g", "arguments": ""}\n</tool_call>', [
            Call("f", {}), Call("g", {})
        ]),
        ("qwen-coder", "<function=get>\n</function>", [Call("get", {})]),
        ("qwen-coder", '<function="get">\r\n<parameter=\'q\'>\r\na\r\nb\r\n</parameter>\r\n</function>', [
            Call("get", {"q": "a\r\nb"})
        ]),
        ("qwen-coder", "<function=get>\n<parameter=q>\na\n<parameter=n>\n5\n</parameter>\n</function>", [
            Call("get", {"q": "a", "n": 5})
        ]),
        *(
            ("qwen-coder", f"<function=get>\n<parameter=n>\n1\n</parameter>\n<parameter=q>\n{value}\n</parameter>\n"
             "<parameter=x>\n2\n</parameter>\n</function>", [Call("get", {"n": 1, "q": value, "x": 2})])
            for value in (
                WRITTEN["qwen-coder"], WRITTEN["qwen-coder"] + "\ndone", WRITTEN["qwen-coder"] * 2,
                "<function=a>\n<parameter=b>\n" + WRITTEN["qwen-coder"] + "\n</parameter>\n</function>",
                "see <function=f> and\n<parameter=zzz>\n", "it ends with </function> there",
                "\n<parameter=n>\n", "\n<parameter=x>\n", "a <parameter=o> b", "a\n<parameter=x>\nb",
            )
        ),
        ("qwen-coder", "<function=get><parameter=q>\n\n a \n\n</parameter></function></tool_call>", [
            Call("get", {"q": "\n a \n"})
        ]),
        ("qwen-coder", "<function=get><parameter=q>a</parameter>b</parameter></function>", [
            Call("get", {"q": "a</parameter>b"})
        ]),
    ],
)  # fmt: skip
def test_what_else_is_a_call(name: str, text: str, calls: list[Call]) -> None:
    """Fault: a form that models write is left in the text."""
    found = tool_parsers()[name].find(text, TOOLS)
    assert (found.content, found.calls, found.num_malformed) == ("", calls, 0)


@table("name, text, calls", [
        *(
            ("hermes", block, 0)
            for block in (
                "<tool_call>{}</tool_call>",
                "<tool_call>not JSON</tool_call>",
                '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
                '<tool_call>{"name": "", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
                '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {}}',
                '<tool_call>{"name": "f", "argumets": {"a": 1}}</tool_call>',
                '<tool_call>{"function": {"name": "f", "args": {"a": 1}}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"a": 1e400}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 400 + "1" + "}" * 400 + "}</tool_call>",
                "<tool_call>" + "[" * 100_000,
                '<tool_call>[{"name": "f"}, 1]</tool_call>',
            )
        ),
    ("hermes", '<tool_call>{"name": <tool_call>{"name": "f"}</tool_call>', 1),
    ("jamba", '<tool_calls>[{"name": "f", "arguments": {}}', 0),
    ("jamba", "<tool_calls>[]</tool_calls>", 0),
    ("jamba", "<tool_calls>[[]]</tool_calls>", 0),
    ("mistral", "[TOOL_CALLS]", 0), ("mistral", "[TOOL_CALLS]f[ARGS][1]", 0), ("mistral", "[TOOL_CALLS]f[ARGS]{", 0),
    ("llama3", '<|python_tag|>brave_search.call(query="x")', 0),
    ("llama3", '{"name": "f", "parameters": {}}; and {"name"', 1),
    ("granite", '<|tool_call|>{"name": 5}', 0),
        *(
            ("lfm2", f"<|tool_call_start|>{block}<|tool_call_end|>", 0)
            for block in (
                "[]",
                "f()",
                "[f]",
                "[f(]",
                '[f("x")]',
                "[f(a)]",
                "[f(a=)]",
                "[f(a=b)]",
                "[f(a=1 b=2)]",
                "[f(a='x)]",
                "[f(a={1.5: 2})]",
                "[f(a=1__0)]",
                "[f(a=1_)]",
                "[f(a='x' y)]",
                '[f(a="""x"")]',
                "[f(a=[1)]",
                "[f(a=007)]",
                "[f(a=1e400)]",
                "[f(a=(1, 2]))]",
                "[f(a=(,))]",
                "[f(a=g())]",
                "[f()] x",
                "[f(a='\\ud800')]",
                "[f(a=1+1)]",
                "[f(a=__import__('os'))]",
                "[f(a=" + "[" * 400 + "]" * 400 + ")]",
                "[f(a=" + "9" * 5000 + ")]",
            )
        ),
    ("lfm2", "<|tool_call_start|>[f(a=1)]", 0), ("nemotron", "<TOOLCALL>[1]</TOOLCALL>", 0),
    ("qwen-coder", "<tool_call>{}", 0),
    ("qwen-coder", "<tool_call><function=get><parameter=q>a</function></tool_call>", 0),
    ("qwen-coder", "<tool_call><function=get><parameter=q>a</parameter>", 0),
    ("qwen-coder", "<function=>", 0),
])  # fmt: skip
def test_what_is_malformed_stays_and_is_counted(name: str, text: str, calls: int) -> None:
    """Fault: what a model wrote is lost, or no warning says that it was no call."""
    found = tool_parsers()[name].find(f" {text} ", TOOLS)
    assert len(found.calls) == calls and found.num_malformed == 1
    if not calls:
        assert found.content == f" {text} "
        if name != "llama3":  # whose calls begin the answer
            good = tool_parsers()[name].find(f"{WRITTEN[name]} {text} ", TOOLS)
            assert (good.content, good.calls) == (f" {text} ", [Call("get", ARGUMENTS)])


@table("text", ["", " a\n", '{"a": 1}', '{"name": "f"}', "[1]", "< tool_call >", "f[ARGS]{}"])
def test_text_without_calls_is_the_content(text: str) -> None:
    """Fault: an answer in JSON, or an empty one, is taken for a call or called malformed."""
    for parser in PARSERS:
        found = parser.find(text, TOOLS)
        assert (found.content, found.calls, found.num_malformed) == (text, [], 0)


@table(
    "key, text, value",
    [
        ("q", "5", "5"), ("q", "null", "null"), ("n", "5", 5), ("n", " 5 ", 5), ("n", "5.0", 5), ("n", "5.5", "5.5"),
        ("n", "five", "five"), ("n", "true", "true"), ("x", "5", 5), ("x", "-5.5e3", -5500.0), ("b", "True", True),
        ("b", "false", False), ("b", "None", None), ("b", "0", "0"), ("o", '{"a": [1]}', {"a": [1]}),
        ("o", "[1]", "[1]"),
        ("o", "{'a': 1, 'b': None}", {"a": 1, "b": None}), ("l", "['a', True]", ["a", True]),
        ("l", "[1e400]", "[1e400]"), ("o", "{'a': '\\ud800'}", "{'a': '\\ud800'}"), ("l", "(1, 2)", [1, 2]),
        ("l", "['a'] + x", "['a'] + x"), ("o", "{'a': 1e400}", "{'a': 1e400}"),
        ("l", '["a", 1]', ["a", 1]), ("l", "null", None), ("e", "2", 2),
        ("unknown", "5", "5"), ("n", "123456789012345678901234567890", 123456789012345678901234567890),
        ("n", "1e400", "1e400"), ("n", "9007199254740991.0", 2**53 - 1),
        ("n", "9007199254740992.0", "9007199254740992.0"),
    ],
)  # fmt: skip
def test_text_is_typed_by_the_schema(key: str, text: str, value: object) -> None:
    """Fault: a number comes as a text, a text as a number, or a digit is lost."""
    written = f"<tool_call><function=get><parameter={key}>\n{text}\n</parameter></function></tool_call>"
    [call] = tool_parsers()["qwen-coder"].find(written, TOOLS).calls
    assert call.arguments == {key: value} and type(call.arguments[key]) is type(value)


N = {"$ref": "#/$defs/N"}
BOTTOMLESS = {"anyOf": [{"$ref": "#/$defs/B"}, {"allOf": [{"$ref": "#/$defs/B"}]}]}
DEFS = {
    "N": {"type": "integer"}, "P": {"properties": {}, "type": "object"}, "R": N, "B": BOTTOMLESS, "a/b~c": N,
    "E": {"enum": [1, 2]}, "S": {"minLength": 1},
}  # fmt: skip


@table(
    "schema, text, value",
    [
        (N, "10", 10), ({"$ref": "#/$defs/R", "description": "d"}, "10", 10),
        ({"$ref": "#/$defs/P"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/a~1b~0c"}, "10", 10), ({"$ref": "#/$defs/E"}, "2", 2), ({"allOf": [N]}, "10", 10),
        ({"anyOf": [N, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "null"}, {"$ref": "#/$defs/P"}]}, "{}", {}),
        ({"allOf": [{"description": "d"}, {"anyOf": [N, {"type": "boolean"}]}]}, "true", True),
        ({"allOf": [{"type": ["integer", "string"]}, N]}, "10", 10), ({"anyOf": [N, {"type": "string"}]}, "10", "10"),
        ({"type": "dict"}, '{"x": 1}', {"x": 1}), ({"type": "float"}, "1.5", 1.5),
        ({"type": "tuple"}, "(1, 2)", [1, 2]),
        ({"type": "Integer"}, "5", 5), ({"type": "bool"}, "True", True), ({"type": "any"}, "5", "5"),
        ({"$ref": "#/$defs/S"}, "5", "5"), ({"$ref": "#/$defs/none"}, "5", "5"), ({"$ref": "https://a/b"}, "5", "5"),
        ({"$ref": "N"}, "5", "5"), ({"$ref": 5}, "5", "5"), ({"allOf": 5}, "5", "5"), (BOTTOMLESS, "5", "5"),
        ({"$ref": "#"}, "{}", {}),
    ],
)  # fmt: skip
def test_types_are_found_wherever_a_schema_has_them(schema: Any, text: str, value: object) -> None:
    """Fault: a parameter typed by $ref, allOf, additionalProperties or the names of another data set stays a text, or a
    schema without an end ends the run."""
    written = f"<function=f><parameter=p>\n{text}\n</parameter></function>"
    for parameters in ({"properties": {"p": schema}}, {"properties": {}, "additionalProperties": schema}):
        tool = {"name": "f", "parameters": {"type": "object", "$defs": DEFS, **parameters}}
        [call] = tool_parsers()["qwen-coder"].find(written, [tool]).calls
        assert call.arguments == {"p": value} and type(call.arguments["p"]) is type(value)


@table("parameters", UNTYPED)
def test_a_schema_of_no_use_types_nothing(parameters: Any) -> None:
    """Fault: a tool without a schema, or with a damaged one, breaks the answer."""
    text = "<function=get><parameter=n>5</parameter></function>"
    function = {"name": "get", "parameters": parameters}
    for tools in ([], [function], [{"function": function}]):
        [call] = tool_parsers()["qwen-coder"].find(text, tools).calls
        assert call.arguments == {"n": "5"}


# What transformers would parse these families' answers with.
RESPONSE_TEMPLATES = {
    "hermes": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
    "jamba": {"open": "<tool_calls>", "close": "</tool_calls>", "content": "json"},
    "nemotron": {"open": "<TOOLCALL>", "close": "</TOOLCALL>", "content": "json"},
    "granite": {"open": "<|tool_call|>", "close_pattern": "$", "content": "json"},
}


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("name", RESPONSE_TEMPLATES)
def test_transformers_reads_the_same_calls(shared_data: Path, model_dir: Callable[..., Path], name: str) -> None:
    """The calls of the recorded answers, as `parse_response` of transformers finds them with a response template."""
    tokenizer = by_transformers(model_dir())
    content = {"close": "<|stop|>", "content": "text"}
    schema = {"start_anchor": "<|begin|>", "fields": {"tool_calls": RESPONSE_TEMPLATES[name], "content": content}}
    compiled, num_calls = Template(TEMPLATES[name], {}), 0
    for record in open_source(str(shared_data / "toolbench_dfs.jsonl")):
        assert isinstance(record, Conversation)
        messages = [as_object(message) for message in record.messages]
        _, whole = compiled.answer(len(messages), messages, record.tools)
        for text in written_by_the_assistant(whole):
            theirs = tokenizer.parse_response(text, schema, prefix="").get("tool_calls", [])
            ours = tool_parsers()[name].find(text, record.tools or []).calls
            assert [{"name": call.name, "arguments": call.arguments} for call in ours] == theirs
            num_calls += len(ours)
    assert num_calls == 130


def as_object(message: dict[str, Any]) -> dict[str, Any]:
    """A message with arguments as templates want them, and ids that Mistral takes."""
    if "tool_calls" not in message:
        return message
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        arguments = call["function"]["arguments"]
        arguments = arguments if isinstance(arguments, dict) else {"text": arguments}
        function = {"name": call["function"]["name"], "arguments": arguments}
        calls.append({"id": f"a{number:08d}", "type": "function", "function": function})
    return {**message, "tool_calls": calls}


MARKERS = sorted({marker for parser in PARSERS for marker in parser.markers})
PIECES = [
    *MARKERS, *WRITTEN.values(), "<function=get>", "<parameter=q>", "</parameter>", "</function>", '{"name": "f"}', "{",
    "[", "]", "}", '"', "\\", ",", ":", ";", "\n", " ", "x", "1", "é", "[ARGS]", "f",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_is_an_answer(text: str) -> None:
    """Every call has a name and arguments that are JSON; nothing else of the text is lost."""
    for parser in PARSERS:
        found = parser.find(text, TOOLS)
        for call in found.calls:
            assert call.name and isinstance(orjson.loads(orjson.dumps(call.arguments)), dict)
        if not found.calls:
            assert found.content == text
        rest = iter(text)
        assert all(character in rest for character in found.content), "the content is the text without pieces of it"


def hostile() -> Callable[[int], str]:
    """Make a text by the number of its pieces, some of them repeated."""
    unit = "".join(random.choices(PIECES, k=random.randint(1, 6)))
    head, tail = ("".join(random.choices(PIECES, k=random.randint(0, 3))) for _ in range(2))
    return lambda count: head + unit * count + tail


# Times that each character is looked at. Behind each marker 256 characters are tried as JSON; the square would be
# some thousand times.
MOST_LOOKS = 100


class Counted(str):
    """A text that counts the characters which are taken out of it."""

    taken = 0

    def __getitem__(self, key: Any) -> str:
        part = super().__getitem__(key)
        Counted.taken += len(part)
        return part

    def partition(self, separator: str) -> tuple[str, str, str]:
        Counted.taken += len(self)
        return super().partition(separator)


class CountedPattern:
    """A pattern that counts the characters which it goes over."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def search(self, text: str, place: int = 0) -> re.Match[str] | None:
        found = self._pattern.search(text, place)
        Counted.taken += (len(text) if found is None else found.end()) - place
        return found

    def match(self, text: str, place: int = 0) -> re.Match[str] | None:
        found = self._pattern.match(text, place)
        Counted.taken += found.end() - place if found is not None else 1
        return found

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        Counted.taken += len(text)
        return self._pattern.finditer(text)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patterns of all parsers count what they go over."""
    for name, module in list(sys.modules.items()):
        if name.startswith(
            (
                "apcbatch.data.output.tool_parsers.",
                "apcbatch.data.output.json_calls",
                "apcbatch.data.output.python_values",
                "apcbatch.data.output.tool_parser",
            )
        ):
            for key, value in list(vars(module).items()):
                if isinstance(value, re.Pattern):
                    monkeypatch.setattr(module, key, CountedPattern(value))


@pytest.mark.drawn(4)
@pytest.mark.slow
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_work_grows_with_the_text(parser: Any) -> None:
    """Fault: a hostile answer takes the square of its length."""
    texts = [hostile() for _ in range(tries(120))]
    units = [*parser.markers, '<tool_call>{"', "<function=f><parameter=a>", '[TOOL_CALLS]f{"a":"', "<function=f>\n"]
    units += ["<|tool_call_start|>[f(a='", '<|tool_call_start|>[f(a="\\', "<|tool_call_start|>[f(a=[{", "[f(a=1),"]
    units += [
        "<|tool_call_start|>[f(a='''",
        '<|tool_call_start|>[f(a="""x""',
        "<|tool_call_start|>[f(a=(",
        "'a' ",
        "1_",
    ]
    units += [
        "<function=get>\n<parameter=q>\n<parameter=n>\n",
        "\n<parameter=n>",
        "<function=get></function></parameter>",
    ]
    units += ["<tool_call><function=f><parameter=a></parameter>", '<tool_call>{"a":[', "</parameter>\n ", "{", "[{"]
    texts += [lambda count, unit=unit: unit * count for unit in units]
    texts.append(lambda count: "<function=get>\n<parameter=q>" * count + "\n</parameter>\n</function>" * count)
    texts.append(lambda count: "<function=f><parameter=a>" * count + "</parameter><parameter=b>")
    for text in texts:
        written, Counted.taken = Counted(text(2_000)), 0
        found = parser.find(written, TOOLS)
        assert Counted.taken < MOST_LOOKS * len(written), written[:200]
        assert len(found.content) <= len(written)
        if written == parser.markers[0] * 2_000:
            assert found.content == written and found.calls == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
)  # fmt: skip


@given(st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), VALUES), st.sampled_from([repr, json.dumps]))
def test_values_in_the_syntax_of_python_come_back(arguments: dict[str, Any], written: Callable[[Any], str]) -> None:
    """Fault: an escape, a number, a word or a nested value that becomes another one."""
    arguments = json.loads(json.dumps(arguments))
    pairs = ", ".join(f"{key}={written(value)}" for key, value in arguments.items())
    found = tool_parsers()["lfm2"].find(f"a<|tool_call_start|>[f({pairs})]<|tool_call_end|>b", [])
    assert found.num_malformed == 0 and found.content == "ab"
    assert found.calls == [Call("f", arguments)] and json.dumps(found.calls[0].arguments) == json.dumps(arguments)


def test_the_schema_is_that_of_the_tool_that_is_called() -> None:
    """Fault: arguments are typed by the first tool's schema, or a tool without a name breaks the answer."""
    other = {"function": {"name": "put", "parameters": {"properties": {"n": {"type": "string"}}}}}
    text = "<function=get><parameter=n>5</parameter></function>"
    [call] = tool_parsers()["qwen-coder"].find(text, [{"function": 5}, {}, other, *TOOLS, other]).calls
    assert call.arguments == {"n": 5}
