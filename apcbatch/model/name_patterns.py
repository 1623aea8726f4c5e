"""Match names of modules against the patterns of a quantisation config, in bounded time.

A pattern comes from a folder that was downloaded, and `re` may take exponential time. Here it runs as a
nondeterministic automaton, by sets of positions in the name (Thompson, "Regular Expression Search Algorithm", 1968): in
polynomial time, and its steps are counted.
"""

from __future__ import annotations

import importlib
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from apcbatch.option_values import brief

MOST_CHARACTERS = 512  # of a pattern
MOST_PATTERNS = 1024
MOST_STEPS = 30_000_000  # of all patterns of a checkpoint, some seconds; three for 73,728 experts take 1,000,000

_ANCHORS = {"AT_BEGINNING": 0, "AT_BEGINNING_STRING": 0, "AT_END": -1, "AT_END_STRING": -1}
_CATEGORIES: Mapping[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal, "SPACE": str.isspace, "WORD": lambda one: one.isalnum() or one == "_",
}  # fmt: skip


class Patterns:
    """Patterns of module names. plain: names, each of which stands for the module and all modules below it, wherever in
    a name it begins; one with a wildcard `*`, any characters, is matched from the name's beginning. regular: regular
    expressions for the beginning of a name, as `re.match` takes them. Raises ValueError, with a clause, for an
    expression that is too long or invalid."""

    def __init__(self, plain: Iterable[str] = (), regular: Iterable[str] = ()) -> None:
        self._plain = frozenset(one for one in plain if "*" not in one)
        self._lengths: dict[str, set[int]] = {}  # of plain names that begin with a part
        for one in self._plain:
            self._lengths.setdefault(one.split(".")[0], set()).add(one.count(".") + 1)
        globs = {one: re.escape(one).replace(r"\*", ".*") + r"(\.|$)" for one in plain if "*" in one}
        self._regular = {one: _parsed(pattern) for one, pattern in (globs | {one: one for one in regular}).items()}
        if len(self._regular) > MOST_PATTERNS:
            raise ValueError(f"it has {len(self._regular):,} patterns; the most is {MOST_PATTERNS:,}")
        self._steps = 0

    def matching(self, module: str) -> str | None:
        """Return a pattern that a module's name matches; None if there is none. Raises ValueError, with a clause, if
        matching takes too many steps."""
        if self._plain:
            parts = module.split(".")
            for begin, part in enumerate(parts):
                for length in self._lengths.get(part, ()):
                    if (name := ".".join(parts[begin : begin + length])) in self._plain:
                        return name
        return next((one for one, nodes in self._regular.items() if self._ends(nodes, module, {0})), None)

    def _ends(self, nodes: Any, name: str, places: set[int]) -> set[int]:
        """Return where a match of `nodes` can end if it begins at one of `places` of a name."""
        for kind, value in nodes:
            self._steps += 1 if kind == "TEXT" else 1 + len(places)
            if self._steps > MOST_STEPS:
                raise ValueError(f"matching its patterns takes more than {MOST_STEPS:,} steps")
            if kind == "TEXT":
                begins = places if len(places) < 8 else list(_found(value, name, min(places)))
                self._steps += len(begins)
                places = {one + len(value) for one in begins if one in places and name.startswith(value, one)}
            elif kind == "BRANCH":
                places = set().union(*(self._ends(branch, name, places) for branch in value))
            elif kind == "SUBPATTERN":
                places = self._ends(value, name, places)
            elif kind == "REPEAT":
                places = self._repeated(value, name, places)
            elif kind in ("ASSERT", "ASSERT_NOT"):
                places = {one for one in places if bool(self._ends(value, name, {one})) == (kind == "ASSERT")}
            elif kind == "AT":
                places = places & {value % (len(name) + 1)}
            elif kind == "BOUNDARY":
                is_word = _CATEGORIES["WORD"]  # false for the empty text at an end
                places = {one for one in places if is_word(name[max(one - 1, 0) : one]) != is_word(name[one : one + 1])}
            else:
                places = {one + 1 for one in places if one < len(name) and value(name[one])}
            if not places:
                break
        return places

    def _repeated(self, value: Any, name: str, places: set[int]) -> set[int]:
        least, most, body = value
        if most > len(name) and body == [("ANY", _any)]:
            return set(range(min(places) + least, len(name) + 1))
        count = 0
        while count < least and places:
            places, before, count = self._ends(body, name, places), places, count + 1
            if places == before:
                break
        found, added = set(places), places
        while added and count < most:
            reached, count = self._ends(body, name, added), count + 1
            self._steps += len(reached)
            added = reached - found
            found |= added
        return found


def _found(text: str, name: str, begin: int) -> Iterator[int]:
    """Yield the places, from `begin` on, at which a text begins in a name."""
    while (begin := name.find(text, begin)) >= 0:
        yield begin
        begin += 1


def _any(character: str) -> bool:
    return True


def _one_of(items: Any, character: str) -> bool:
    """Return whether a character is in a set of a regular expression."""
    negated, code = False, ord(character)
    for op, value in items:
        kind = str(op)
        if kind == "NEGATE":
            negated = True
        elif kind == "CATEGORY":
            name = str(value).removeprefix("CATEGORY_")
            if _CATEGORIES[name.removeprefix("NOT_")](character) != name.startswith("NOT_"):
                return not negated
        elif (value == code) if kind == "LITERAL" else (value[0] <= code <= value[1]):
            return not negated
    return negated


def _parsed(pattern: str) -> list[tuple[str, Any]]:
    """Parse a regular expression into the nodes that Patterns follows. Raises ValueError, whose message is a clause."""
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"the pattern {brief(pattern)} has {len(pattern):,} characters; the most is {MOST_CHARACTERS}")
    parser = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse(pattern)
        if parsed.state.flags & ~re.UNICODE:
            raise LookupError
        return _nodes(parsed)
    except LookupError:
        raise ValueError(f"the pattern {brief(pattern)} has flags, references or others that are not read") from None
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the pattern {brief(pattern)} is no regular expression ({error})") from None


def _nodes(parsed: Any) -> list[tuple[str, Any]]:
    """Return the nodes of a parsed expression as (kind, value). Raises LookupError for one that is not supported."""
    found: list[tuple[str, Any]] = []
    for op, value in parsed:
        match str(op), value:
            case "LITERAL", _ if found and found[-1][0] == "TEXT":
                found[-1] = ("TEXT", found[-1][1] + chr(value))
            case "LITERAL", _:
                found.append(("TEXT", chr(value)))
            case "ANY", _:
                found.append(("ANY", _any))
            case "NOT_LITERAL", _:
                found.append(("IN", partial(operator.ne, chr(value))))
            case "IN", _:
                found.append(("IN", partial(_one_of, value)))
            case "BRANCH", (_, branches):
                found.append(("BRANCH", list(map(_nodes, branches))))
            case "SUBPATTERN", (_, 0, 0, body):
                found.append(("SUBPATTERN", _nodes(body)))
            case (("MAX_REPEAT" | "MIN_REPEAT"), (least, most, body)):
                found.append(("REPEAT", (least, most, _nodes(body))))
            case (("ASSERT" | "ASSERT_NOT"), (1, body)):
                found.append((str(op), _nodes(body)))
            case "AT", _ if str(value) == "AT_BOUNDARY":
                found.append(("BOUNDARY", None))
            case "AT", _:
                found.append(("AT", _ANCHORS[str(value)]))
            case _:
                raise LookupError(str(op))
    return found
