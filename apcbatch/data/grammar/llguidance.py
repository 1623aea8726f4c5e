"""Translate structured output to a grammar of llguidance: a format and a text.

The formats are `llguidance` (a list of grammars as JSON), `regex`, and `grammar`: Lark's syntax with the library's
extensions, or the GBNF of llama.cpp, which the library converts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from apcbatch.data.grammar.structured_output import StructuredOutput
from apcbatch.data.json_text import read_json, schema_at
from apcbatch.data.output.tool_parser import CallSyntax
from apcbatch.errors import RequestError

# (pattern that matches the texts of the added tokens, or None; function from such a text to its token id)
Markers = tuple[re.Pattern[str] | None, Callable[[str], int | None]]


@dataclass(frozen=True, slots=True)
class Thinking:
    """Markers of the reasoning before structured output: one of `begins` opens the reasoning, one of `ends` ends it.

    is_open: whether the prompt ends within reasoning. If so, the answer must end it; if not, the answer may begin with
    reasoning or have none.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    is_open: bool


def grammar_source(structure: StructuredOutput, syntax: CallSyntax | None, markers: Markers) -> tuple[str, str]:
    """Translate structured output; return the format and the text of the grammar.

    syntax: how the model writes calls; None without tool calls. RequestError for calls that cannot be forced,
    ValueError for a schema with numbers that the library would change.
    """
    if structure.kind == "json":
        schema = _prepared(read_json(structure.text))
        return "llguidance", _lists(json_schema=_spaced(schema, structure.whitespace))
    if structure.kind == "choice":
        texts = " | ".join(map(_quoted, read_json(structure.text)))
        return "llguidance", _lists(lark_grammar=f"start: {texts}")
    if structure.kind == "calls":
        return "llguidance", _lists(lark_grammar=_calls(structure, syntax, markers))
    return structure.kind, structure.text


def behind_thinking(grammar: str, thinking: Thinking, markers: Markers) -> str:
    """Return a grammar of the reasoning followed by the given grammar. Both are in the format `llguidance`."""
    [answer] = json.loads(grammar)["grammars"]
    rules = ["start: thought @answer" if thinking.is_open else "start: @answer | begin thought @answer"]
    rules.append("begin: " + " | ".join(_terms(one, markers) for one in thinking.begins))
    ends = []
    for number, marker in enumerate(thinking.ends):
        end = _terms(marker, markers)
        if end.startswith("<["):
            ends.append(f"/(?s:.*)/ {end}")
        else:
            ends.append(f"ended_{number}")
            rules.append(f"ended_{number}[lazy]: /(?s:.*)/ {end}")
    rules.append("thought: (" + " | ".join(ends) + ") /[ \\t\\r\\n]{0,8}/")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {**answer, "name": "answer"}]})


def _prepared(schema: Any) -> Any:
    """Return a schema as the library takes it; it is changed in place. ValueError for one that the library would not
    enforce exactly, and for one that no finite value satisfies."""
    check_numbers(schema)
    for holder in _subschemas(schema):
        if holder.get("uniqueItems") is False:  # which means nothing, and which the library refuses
            del holder["uniqueItems"]
    if not is_finite(schema):
        raise ValueError("no finite value satisfies it: a $ref leads back to its own schema without an end")
    return schema


def _lists(**grammar: object) -> str:
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)


def _spaced(schema: Any, whitespace: str) -> Any:
    """Add to a schema the pattern of the whitespace between JSON tokens; an empty pattern allows none."""
    if not isinstance(schema, Mapping):
        schema = {"allOf": [schema]}
    options = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return {**schema, "x-guidance": options}


def _calls(structure: StructuredOutput, syntax: CallSyntax | None, markers: Markers) -> str:
    """Write a Lark grammar of calls in the model's syntax: one rule per tool, with the arguments by its schema."""
    if syntax is None or syntax.arguments != "json":
        reason = "does not write their arguments as JSON" if syntax else "writes none that are read (see --tool-parser)"
        raise RequestError(
            "invalid_request", f"tool_choice asks for a call, and the model {reason}, so none can be forced"
        )
    tools = read_json(structure.text)
    more = "" if structure.one_call else f" ({_terms(syntax.separator, markers)} call)*"
    rules = [f"start: {_terms(syntax.begin, markers)} call{more} {_terms(syntax.end, markers)}"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, (name, parameters) in enumerate(tools):
        try:
            parameters = _prepared(parameters)
        except ValueError as error:
            raise ValueError(f"{_quoted(name)}: {error}") from None
        before = syntax.before_name + json.dumps(name, ensure_ascii=False)[1:-1] + syntax.before_arguments
        after = _terms(syntax.after_arguments, markers)
        rules.append(f"call_{number}: {_terms(before, markers)} arguments_{number} {after}")
        schema = json.dumps(_spaced(parameters, structure.whitespace), ensure_ascii=False)
        rules.append(f"arguments_{number}: %json {schema}")
    return "\n".join(rules)


def _terms(text: str, markers: Markers) -> str:
    """Write a text as terms of a Lark rule: added tokens by their ids, other text as strings."""
    pattern, id_of = markers
    terms: list[str] = []
    begin = 0
    for place in pattern.finditer(text) if pattern is not None else ():
        terms += [_quoted(text[begin : place.start()]), f"<[{id_of(place[0])}]>"]
        begin = place.end()
    terms.append(_quoted(text[begin:]))
    return " ".join(term for term in terms if term != '""')


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_EXACT = 2**53  # up to here a float of 64 bits holds each integer exactly
_BEYOND = 2**63
_LARGEST_PRODUCT = 2**32  # the library multiplies the multipleOf of schemas that apply together, modulo this
_VALUES = ("const", "enum")
_MOST_ROUNDS = 64  # in which schemas without a finite value are looked for
_FLOAT = re.compile(rb"-?[0-9]+(?:\.[0-9]+(?:[eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+)")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_KEYWORDS = (*_VALUES, "minimum", "maximum", *_EXCLUSIVE, "multipleOf")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ANNOTATIONS = ("default", "example", "examples", "title", "description", "$comment")


def check_numbers(schema: object) -> None:
    """Check that the library enforces the numbers of a schema exactly; ValueError names one that it would change."""
    steps: list[Decimal] = []
    for word, number, holder in _numbers(schema):
        if not _is_kept(word, number, holder):
            raise ValueError(
                f"{word} has the number {str(number)[:40]}, which the grammar library would change, since it counts in "
                "floats of 64 bits; give an integer within 2^53, a float of up to 15 digits, or a string"
            )
        if word == "multipleOf":
            steps.append(abs(Decimal(str(number))))
    digits = max((-int(step.as_tuple().exponent) for step in steps), default=0)
    whole = [int(step.scaleb(digits)) for step in steps]
    if len(whole) > 1 and math.lcm(*whole) * max(whole) >= _LARGEST_PRODUCT:
        raise ValueError("the numbers of multipleOf are too large: what holds at once is multiplied in 32 bits")


def _numbers(schema: object) -> Iterator[tuple[str, int | float, Mapping[str, Any]]]:
    """Yield (keyword, number, schema that has the keyword) for each number of a schema that constrains an answer."""
    for holder in _subschemas(schema):
        for word in _KEYWORDS:
            left = [holder.get(word)]
            while left:
                value = left.pop()
                if isinstance(value, (list, dict)):
                    left += value.values() if isinstance(value, dict) else value
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    yield word, value, holder


def _subschemas(schema: object) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            yield value
            for key, one in value.items():
                if key in _SCHEMAS_BY_NAME and isinstance(one, dict):
                    left += one.values()
                elif key not in _ANNOTATIONS and key not in _KEYWORDS:
                    left.append(one)


def check_digits(data: bytes, structure: StructuredOutput) -> None:
    """Check that no float in an enum or a const lost digits when its line was read; ValueError names one that did.

    data: the line as it was written."""
    lost: dict[float, str] = {}
    for found in _FLOAT.findall(data) if structure.kind in ("json", "calls") else ():
        text = found.decode()
        try:
            is_exact = Decimal(text) == Decimal(repr(float(text)))
        except InvalidOperation:  # an exponent beyond Decimal's
            is_exact = False
        if not is_exact:
            lost[float(text)] = text
    for word, number, _ in _numbers(read_json(structure.text)) if lost else ():
        if word in _VALUES and isinstance(number, float) and number in lost:
            raise ValueError(
                f"{word} has the number {lost[number][:40]}, which a float of 64 bits cannot hold; give fewer digits, "
                "or a string"
            )


def is_finite(schema: Any) -> bool:
    """Return whether a finite value may satisfy a schema: False only if each value needs another one of the schema of a
    `$ref` without an end."""
    references = {one["$ref"]: False for one in _subschemas(schema) if isinstance(one.get("$ref"), str)}
    targets = {name: schema_at(schema, name) for name in references}
    try:
        for _ in range(_MOST_ROUNDS):
            found = {name: references[name] or _has_value(target, references) for name, target in targets.items()}
            if found == references:
                return _has_value(schema, references)
            references = found
    except RecursionError:
        pass
    return True


def _has_value(schema: Any, references: Mapping[str, bool]) -> bool:
    """Return whether a finite value may satisfy a schema. references: the same for the target of each `$ref`."""
    if not isinstance(schema, dict) or any(word in schema for word in _VALUES):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and not references[reference]:
        return False
    if not all(_has_value(one, references) for one in _items(schema.get("allOf"))):
        return False
    for word in ("anyOf", "oneOf"):
        if (choices := _items(schema.get(word))) and not any(_has_value(one, references) for one in choices):
            return False
    if schema.get("type") == "object":
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        needed = [
            properties[name] for name in _items(schema.get("required")) if isinstance(name, str) and name in properties
        ]
    elif schema.get("type") == "array" and isinstance(least := schema.get("minItems", 0), int):
        first = _items(schema.get("prefixItems"))
        needed = first[:least] + [schema.get("items", True)] * (least > len(first))
    else:
        needed = []
    return all(_has_value(one, references) for one in needed)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_kept(word: str, number: int | float, holder: Mapping[str, Any]) -> bool:
    """Return whether the library enforces a number of a schema exactly. word: the keyword that it belongs to. holder:
    the schema that has the keyword."""
    if isinstance(number, float):
        return abs(number) <= _EXACT and _as_read(number) == number
    is_exclusive = word in _EXCLUSIVE or holder.get(f"exclusive{word.title()}") is True
    if abs(number) < _EXACT or (abs(number) == _EXACT and not is_exclusive):
        return True
    kinds = holder.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if is_exclusive or not -_BEYOND < number < _BEYOND:
        return False
    if word not in _VALUES and ("integer" not in kinds or "number" in kinds):  # bounds of floats are cut by digits
        return False
    return int(float(number)) == number or (word == "maximum" and number == _BEYOND - 1)


def _as_read(number: float) -> float:
    """Parse a float's text as the library does: take its digits as an integer, and divide by a power of ten."""
    _, digits, exponent = Decimal(repr(abs(number))).as_tuple()
    read, places = float(int("".join(map(str, digits)))), -int(exponent)
    while places > 308:
        read, places = read / 1e308, places - 308
    return math.copysign(read / float(f"1e{places}"), number)
