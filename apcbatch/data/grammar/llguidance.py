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
from decimal import Decimal
from typing import Any

from apcbatch.data.grammar.structured_output import StructuredOutput
from apcbatch.data.json_text import read_json
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
        schema = read_json(structure.text)
        check_numbers(schema)
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
            check_numbers(parameters)
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
    left: list[tuple[object, str, Mapping[str, Any]]] = [(schema, "", {})]
    while left:
        value, word, holder = left.pop()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if word:
                yield word, value, holder
        elif isinstance(value, list) or (word and isinstance(value, dict)):
            left += [(one, word, holder) for one in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, dict):
            for key, one in value.items():
                if key in _SCHEMAS_BY_NAME and isinstance(one, dict):
                    left += [(inner, "", value) for inner in one.values()]
                elif key not in _ANNOTATIONS:
                    left.append((one, key if key in _KEYWORDS else "", value))


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
