"""Define the interface of tool parsers: how a family of models writes calls, and how to find them in an answer.

Each module of `tool_parsers/` has one tool parser. Invariants of every `find`: it raises no exception; text outside
the calls stays in the content unchanged; its time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from apcbatch.data.conversation import Tool
from apcbatch.data.json_text import read_json, write_json

IdFormat = Literal["plain", "nine"]


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call. id: the id that the model wrote, or that call_ids gave it; None without one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(slots=True)
class Found:
    """Result of a search for tool calls in an answer.

    content: the text without the calls. calls: the parsed calls. num_malformed: number of calls that cannot be parsed;
    they stay in the content. begin: index of the marker of the first parsed call; None if no marker begins it.
    """

    content: str
    calls: list[Call]
    num_malformed: int
    begin: int | None


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax of a family's tool calls, from which a grammar is made that forces them.

    The text is `begin`, the calls with `separator` between them, and `end`. A call is `before_name`, the tool's name,
    `before_arguments`, the arguments and `after_arguments`. arguments: `json` for a JSON object, `xml` for a
    `<parameter=NAME>` element per argument.
    """

    begin: str
    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str
    end: str
    arguments: Literal["json", "xml"] = "json"


@dataclass(frozen=True, slots=True)
class ToolParser:
    """Parser of one family's tool calls.

    markers: texts that enclose calls; decoding keeps them even if they are special tokens. syntax: how the family
    writes calls. detects: text of a chat template -> whether it writes calls in this way. find: (text of an answer,
    tools of the request) -> the calls in it. id_format: ids that the family's templates accept: `plain`, any printable
    text; `nine`, nine letters and digits. reads_tools: whether find converts arguments by the schemas of the tools; if
    not, it ignores the tools.
    """

    name: str
    markers: tuple[str, ...]
    syntax: CallSyntax
    detects: Callable[[str], bool]
    find: Callable[[str, Sequence[Tool]], Found]
    id_format: IdFormat = "plain"
    reads_tools: bool = False


# Parses calls after a marker: (text, index after the marker) -> (calls, their end), or (None, index from which the
# search for markers continues) if they are malformed.
Reader = Callable[[str, int], tuple[list[Call] | None, int]]


def find_marked(text: str, marker: re.Pattern[str], read: Reader) -> Found:
    """Find the calls after each match of the marker. read: parser of the text after a match."""
    kept: list[str] = []
    calls: list[Call] = []
    begin = position = malformed = 0
    first: int | None = None
    while (place := marker.search(text, position)) is not None:
        found, position = read(text, place.end())
        if found is None:
            malformed += 1
            continue
        calls += found
        first = place.start() if first is None else first
        kept.append(text[begin : place.start()])
        begin = position
    kept.append(text[begin:])
    return Found("".join(kept), calls, malformed, first)


def call_of(name: object, arguments: object, call_id: object = None) -> Call | None:
    """Make a call, or return None if a part is invalid.

    name: a text that is not empty. arguments: an object that can be written as JSON, JSON text of one, or, for no
    arguments, None or a blank text. call_id: ignored if it is not a text, or is empty."""
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else None
        except ValueError:
            return None
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        write_json(arguments)
    except ValueError:  # nested too deeply, or a number that is not finite
        return None
    return Call(name, arguments, call_id if isinstance(call_id, str) and call_id else None)
