"""What the grammar library is given for a structure: a format that it reads, and a text.

Must not know: the library, engines. The formats are those of llguidance: `llguidance` (a list of grammars as JSON),
`regex`, and `grammar` (Lark's syntax with the library's extensions, or the GBNF of llama.cpp, which it converts).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from apcbatch.data.json_text import read_json
from apcbatch.data.schema_numbers import check_numbers
from apcbatch.data.structure import Structure
from apcbatch.data.tool_parser import CallSyntax
from apcbatch.errors import RequestError

# A pattern of the texts that are tokens of their own, or None, and the id of one of them.
Markers = tuple[re.Pattern[str] | None, Callable[[str], int | None]]


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning before the form: between any of `begins` and any of `ends`. is_open: the prompt has begun it, so it
    must come to its end; else it may be left out."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    is_open: bool


def grammar_source(structure: Structure, syntax: CallSyntax | None, markers: Markers) -> tuple[str, str]:
    """The format and the text of a structure. syntax: how the model writes calls; None if it writes none.

    RequestError for calls that cannot be forced, ValueError for a schema with numbers that the library changes.
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
    """A grammar of the library with reasoning before it."""
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
    """A schema with what may stand between the tokens of its JSON."""
    if not isinstance(schema, Mapping):
        schema = {"allOf": [schema]}
    options = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return {**schema, "x-guidance": options}


def _calls(structure: Structure, syntax: CallSyntax | None, markers: Markers) -> str:
    """Calls as the model writes them: one rule for each tool, its name, and arguments by its schema."""
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
    """A text as the terms of a rule: tokens of their own by their ids, the rest as it is."""
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
