"""What a parser of tool calls is: how one family of models writes calls, and how they are found in an answer.

Must not know: any one family, tokens, records. Each module of `tool_parsers/` has one. Invariants of every `find`: it
never raises; what is no call stays in the content, character by character; its work grows with the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from apcbatch.data.json_text import read_json, write_json
from apcbatch.data.messages import Tool

IdForm = Literal["plain", "nine"]


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call. id: the one that the model itself wrote, if its family writes ids."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(slots=True)
class Found:
    """What an answer's text consists of. content: all that is no call. num_malformed: the places where a call begins
    that cannot be read; they are in the content."""

    content: str
    calls: list[Call] = field(default_factory=list)
    num_malformed: int = 0


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written, piece by piece, for whoever wants to force them.

    An answer's calls are `begin`, the calls with `separator` between them, and `end`. A call is `before_name`, the
    tool's name, `before_arguments`, the arguments and `after_arguments`. arguments: an object in JSON, or a
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

    markers: texts that enclose calls; they are kept when an answer is decoded, even if they are special tokens.
    tells: whether a chat template with this text writes calls in this way. find: the calls in the text of an answer
    to a request with these tools. id_form: what the family's templates accept as the id of a call; `nine` is nine
    letters and digits. reads_tools: it types arguments by the tools; else find needs none of them.
    """

    name: str
    markers: tuple[str, ...]
    syntax: CallSyntax
    tells: Callable[[str], bool]
    find: Callable[[str, Sequence[Tool]], Found]
    id_form: IdForm = "plain"
    reads_tools: bool = False


# Reads what stands behind a marker, at a place of a text: the calls, or None, and the place where they end or where
# the search goes on.
Reader = Callable[[str, int], tuple[list[Call] | None, int]]


def find_marked(text: str, marker: re.Pattern[str], read: Reader) -> Found:
    """The calls behind each place where the marker is found."""
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
    """A call from its parts: a name that is not empty, and arguments that are an object, JSON text of one, or nothing.
    None for anything else, and for arguments that cannot be written as JSON again."""
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
