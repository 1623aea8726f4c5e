"""Read structured output from a request: a JSON schema, a regular expression, choices, a grammar, or forced calls.

The fields are those of OpenAI (response_format, tool_choice) and of vLLM (structured_outputs, guided_*). A schema that
the grammar library does not support is refused when it is compiled (data/grammar/constraint.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from apcbatch.data.checks import (
    invalid,
    missing,
    need_object,
    need_string,
    optional_flag,
    optional_string,
    shown,
    wrong,
)
from apcbatch.data.conversation import Tool
from apcbatch.data.json_text import read_json, write_json

OutputKind = Literal["json", "regex", "choice", "grammar", "calls"]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# Whitespace between JSON tokens: none, a space, or a line end and up to 20 blanks. Without a limit a model could write
# blanks for ever.
WHITESPACE = r" |\n[ \t]{0,20}"

_FORM = "an object with the type text, json_object or json_schema"
_CHOICES = "a list of different texts that are not empty"
_CHOICE = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
# A JSON schema of a tool's parameters has at least one of these.
_SCHEMA_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
    + ("allOf", "anyOf", "oneOf", "$ref", "const", "enum", "$schema", "title", "description")
)
# Older fields of vLLM -> the keys of structured_outputs that replace them.
_GUIDED: Mapping[str, OutputKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that a request asks for in its answer.

    kind: `json`, `regex`, `choice`, `grammar` or `calls`. text: the schema, the regular expression, the list of choices
    as JSON, the grammar, or the list of (tool name, parameters) as JSON. whitespace: pattern of the whitespace between
    JSON tokens. one_call: the answer is exactly one call; False allows several.
    """

    kind: OutputKind
    text: str
    whitespace: str = WHITESPACE
    one_call: bool = False

    def __repr__(self) -> str:
        """Return the text that is part of a request's digest in OUT. It must not change, since --resume compares the
        digests."""
        return (
            f"Structure(kind={self.kind!r}, text={self.text!r}, whitespace={self.whitespace!r}, "
            f"one_call={self.one_call!r})"
        )


def check_structured_output(
    record: Mapping[str, Any], tools: Sequence[Tool] | None, where: str = ""
) -> StructuredOutput | None:
    """Read the structured output that a body (where: `body.`) or a line asks for; return None without any.

    tools: checked tools of the record. RequestError for an invalid value, and for two forms at once.
    """
    found: list[tuple[str, StructuredOutput]] = []
    whitespace = optional_string(record, "guided_whitespace_pattern", f"{where}guided_whitespace_pattern")
    response_format = _response_format(record.get("response_format"), f"{where}response_format")
    if response_format is not None:
        found.append((f"{where}response_format", response_format))
    found += _structured_outputs(record.get("structured_outputs"), f"{where}structured_outputs")
    for name, kind in _GUIDED.items():
        if not _is_unset(record.get(name)):
            structure = StructuredOutput(kind, _text(kind, record[name], f"{where}{name}"), whitespace or WHITESPACE)
            found.append((f"{where}{name}", structure))
    calls = _forced_calls(record, tools, where)
    if calls is not None:
        found.append((f"{where}tool_choice", calls))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise invalid(f"{names} ask for different forms of one answer; give one of them")
    return found[0][1] if found else None


def given_structured_output(
    record: Mapping[str, Any], tools: Sequence[Tool] | None, where: str
) -> dict[str, StructuredOutput]:
    """Return the structured output of a record as the setting `structure`; an empty dict if it asks for none."""
    structure = check_structured_output(record, tools, where)
    return {} if structure is None else {"structure": structure}


def _is_unset(value: object) -> bool:
    """Return whether a field is absent, null or empty."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def _response_format(value: object, where: str) -> StructuredOutput | None:
    if value is None:
        return None
    form = need_object(value, where, _FORM)
    kind = need_string(form, "type", f"{where}.type", "text, json_object or json_schema")
    if kind == "text":
        _only(form, where, "type")
        return None
    if kind == "json_object":
        _only(form, where, "type", "schema")  # a schema here is what llama.cpp's server takes
        schema = form.get("schema")
        return StructuredOutput("json", _json(ANY_OBJECT if schema is None else schema, f"{where}.schema"))
    if kind == "json_schema":
        _only(form, where, "type", "json_schema")
        if "json_schema" not in form:
            raise missing(f"{where}.json_schema", "an object with a name and a schema")
        where = f"{where}.json_schema"
        inner = need_object(form["json_schema"], where, "an object with a name and a schema")
        _only(inner, where, "name", "description", "schema", "strict")
        optional_string(inner, "name", f"{where}.name")
        optional_string(inner, "description", f"{where}.description")
        optional_flag(inner, "strict", f"{where}.strict")
        if "schema" not in inner:
            raise missing(f"{where}.schema", "a JSON schema")
        return StructuredOutput("json", _json(inner["schema"], f"{where}.schema"))
    raise wrong(f"{where}.type", kind, "text, json_object or json_schema")


def _structured_outputs(value: object, where: str) -> list[tuple[str, StructuredOutput]]:
    if value is None:
        return []
    given = need_object(value, where)
    _only(given, where, *_GUIDED.values(), "json_object", "whitespace_pattern", "disable_any_whitespace")
    whitespace = optional_string(given, "whitespace_pattern", f"{where}.whitespace_pattern") or WHITESPACE
    if optional_flag(given, "disable_any_whitespace", f"{where}.disable_any_whitespace"):
        whitespace = ""
    found: list[tuple[str, StructuredOutput]] = []
    for kind in _GUIDED.values():
        if not (given.get(kind) is None or given[kind] in ("", [])):  # {} is a schema that allows anything
            found.append(
                (f"{where}.{kind}", StructuredOutput(kind, _text(kind, given[kind], f"{where}.{kind}"), whitespace))
            )
    if optional_flag(given, "json_object", f"{where}.json_object"):
        found.append((f"{where}.json_object", StructuredOutput("json", _json(ANY_OBJECT, where), whitespace)))
    return found


def _text(kind: OutputKind, value: object, where: str) -> str:
    """Check a field's value; return it as StructuredOutput.text."""
    if kind == "json":
        if isinstance(value, str):
            try:
                value = read_json(value)
            except ValueError:
                raise wrong(where, value, "a JSON schema, as an object or as JSON text") from None
        return _json(value, where)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise wrong(where, value, _CHOICES)
        if len(set(value)) < len(value):
            raise invalid(f"{where} has the same text twice; expected {_CHOICES}")
        return _dumped(value, where)
    if not isinstance(value, str):
        raise wrong(where, value, "a regular expression" if kind == "regex" else "the text of a grammar")
    return value


def _json(schema: object, where: str) -> str:
    """Write a schema as JSON text. The order of its keys is kept, since the answer's keys have the same order."""
    if not isinstance(schema, (dict, bool)):
        raise wrong(where, schema, "a JSON schema: an object")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise invalid(f'{where} has the key "x-guidance", which is not JSON schema; leave it out')
    return _dumped(schema, where)


def _dumped(value: object, where: str) -> str:
    try:
        return write_json(value)
    except ValueError as error:  # nested too deeply, or a number that is not finite
        raise invalid(f"{where} cannot be written as JSON: {error}") from None


def _forced_calls(record: Mapping[str, Any], tools: Sequence[Tool] | None, where: str) -> StructuredOutput | None:
    choice = record.get("tool_choice")
    if choice is None or choice in ("none", "auto"):
        return None
    one_call = record.get("parallel_tool_calls") is False
    named = None
    if choice != "required":
        if not isinstance(choice, dict):
            raise wrong(f"{where}tool_choice", choice, _CHOICE)
        if choice.get("type") != "function" or not isinstance(choice.get("function"), dict):
            raise invalid(f"{where}tool_choice is an object of another kind; expected {_CHOICE}")
        _only(choice, f"{where}tool_choice", "type", "function")
        _only(choice["function"], f"{where}tool_choice.function", "name")
        named = need_string(choice["function"], "name", f"{where}tool_choice.function.name", "a tool's name")
        one_call = True
    if not tools:
        raise invalid(f"{where}tool_choice asks for a call, and there are no tools; give tools, or leave it out")
    callable_ = {name: parameters for name, parameters in map(_name_and_parameters, tools) if name is not None}
    if named is not None:
        if named not in callable_:
            names = ", ".join(map(shown, list(callable_)[:8]))
            raise invalid(f"{where}tool_choice names {shown(named)}, which is none of the tools: {names}")
        callable_ = {named: callable_[named]}
    if not callable_:
        raise invalid(f"{where}tool_choice asks for a call, and no tool has a name; give each one a function's name")
    wanted = [(name, _parameters(name, parameters)) for name, parameters in callable_.items()]
    return StructuredOutput("calls", _dumped(wanted, f"{where}tools"), one_call=one_call)


def _name_and_parameters(tool: Tool) -> tuple[str | None, object]:
    """Return the name of a tool and the schema of its arguments. The tool has OpenAI's form or is a bare function."""
    function = tool["function"] if isinstance(tool.get("function"), dict) else tool
    name = function.get("name")
    return (name if isinstance(name, str) and name else None), function.get("parameters")


def _parameters(name: str, schema: object) -> Mapping[str, Any]:
    """Check the schema of a tool's arguments; return it with `"type": "object"`. RequestError for any other type."""
    if schema is None or schema == {}:
        return ANY_OBJECT
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise invalid(f"the parameters of the tool {shown(name)} are no schema of an object, so it cannot be forced")
    if not schema.keys() & _SCHEMA_KEYS:
        names = ", ".join(map(shown, list(schema)[:8]))
        raise invalid(
            f"the parameters of the tool {shown(name)} are no JSON schema (they have {names}); give properties"
        )
    if "x-guidance" in schema:
        raise invalid(f'the parameters of the tool {shown(name)} have the key "x-guidance"; leave it out')
    return {"type": "object", **schema}


def _only(value: Mapping[str, Any], where: str, *known: str) -> None:
    """Raise RequestError for a key that is not known, unless its value is null."""
    for key, one in value.items():
        if key not in known and one is not None:
            expected = ", ".join(known)
            raise invalid(f"{where} has the field {shown(str(key))}, which is not supported; its fields are {expected}")
