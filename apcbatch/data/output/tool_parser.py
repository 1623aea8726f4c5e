"""The interface of tool parsers: how one family of models writes calls, and how they are found in an answer.

Each module of `tool_parsers/` has one. Invariants of every `find`: it never raises; text that is no call stays in the
content unchanged; its time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from apcbatch.data.input.messages import Tool
from apcbatch.data.json_text import read_json, write_json

IdFormat = Literal["plain", "nine"]


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call. id: the one that the model wrote, if any."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(slots=True)
class Found:
    """The tool calls of an answer. content: the rest of the text. num_malformed: number of calls that cannot be parsed;
    they are in the content."""

    content: str
    calls: list[Call] = field(default_factory=list)
    num_malformed: int = 0


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written, for a grammar that forces them.

    An answer's calls are `begin`, the calls with `separator` between them, and `end`. A call is `before_name`, the
    tool's name, `before_arguments`, the arguments and `after_arguments`. arguments: a JSON object, or a
    `<parameter=NAME>` element for each argument.
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
    """The calls of one family.

    markers: texts that enclose calls; decoding keeps them even if they are special tokens.
    detects: whether a chat template with this text writes calls in this way. find: the calls in the text of an answer
    to a request with these tools. id_format: what the family's templates accept as the id of a call; `nine` is nine
    letters and digits. reads_tools: it types arguments by the tools; else find needs none of them.
    """

    name: str
    markers: tuple[str, ...]
    syntax: CallSyntax
    detects: Callable[[str], bool]
    find: Callable[[str, Sequence[Tool]], Found]
    id_format: IdFormat = "plain"
    reads_tools: bool = False


# Parses the text after a marker: (text, place) -> (the calls, or None, and the place where they end or where the search
# continues).
Reader = Callable[[str, int], tuple[list[Call] | None, int]]


def find_marked(text: str, marker: re.Pattern[str], read: Reader) -> Found:
    """The calls after each match of the marker."""
    kept: list[str] = []
    calls: list[Call] = []
    begin = position = malformed = 0
    while (place := marker.search(text, position)) is not None:
        found, position = read(text, place.end())
        if found is None:
            malformed += 1
            continue
        calls += found
        kept.append(text[begin : place.start()])
        begin = position
    kept.append(text[begin:])
    return Found("".join(kept), calls, malformed)


def call_of(name: object, arguments: object, call_id: object = None) -> Call | None:
    """A call from a name that is not empty and arguments: an object, JSON text of one, or None. None for anything else,
    and for arguments that cannot be written as JSON again."""
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            return None
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        write_json(arguments)
    except ValueError:  # nested deeper than it writes, or not finite
        return None
    return Call(name, arguments, call_id if isinstance(call_id, str) and call_id else None)
