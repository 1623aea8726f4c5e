"""Everything for which one input line would be refused, where a run names only the first.

Must not know: which fields there are, or why one is refused: it asks the checks of data/records.py again, each time
without the field that was named before. Every function is pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apcbatch.data.layouts import ANY_LINE, LineOptions
from apcbatch.data.records import BadLine, parse_record
from apcbatch.formats import COMPLETIONS_URL

# What a line asks: the rest of it is settings, harmless fields and columns.
_ASKED = {"id", "custom_id", "method", "url", "body", "messages", "conversations"}
_ASKED_IN_BODY = {"messages", "prompt"}
_SMALL = {
    "messages": [{"role": "user", "content": "a"}],
    "conversations": [{"from": "human", "value": "a"}],
    "prompt": "a",
}
MOST_REFUSALS = 100


def refusals(record: object, line: int, options: LineOptions = ANY_LINE) -> list[str]:
    """A sentence for each thing that is wrong with a parsed line, up to MOST_REFUSALS; the run's own one is first."""
    first = _refused(record, line, options)
    if first is None:
        return []
    if not isinstance(record, dict):
        return [first]
    found = [first]
    for sentence in (*_of_fields(record, line, options), _of_content(record, line, options)):
        if sentence is not None and sentence not in found:
            found.append(sentence)
    return found[:MOST_REFUSALS]


def _refused(record: object, line: int, options: LineOptions) -> str | None:
    parsed = parse_record(record, line, options)
    return parsed.error.message if isinstance(parsed, BadLine) else None


def _of_content(record: dict[str, Any], line: int, options: LineOptions) -> str | None:
    """What is wrong with what is asked, without any field beside it."""
    bare = {name: value for name, value in record.items() if name in _ASKED}
    if isinstance(bare.get("body"), dict):
        bare["body"] = {name: value for name, value in bare["body"].items() if name in _ASKED_IN_BODY}
    return _refused(bare, line, options)


def _of_fields(record: dict[str, Any], line: int, options: LineOptions) -> Iterator[str]:
    """What is wrong with the fields beside a small question in place of the line's own."""
    left = {name: _SMALL.get(name, value) for name, value in record.items()}
    objects = [(left, _ASKED)]
    if isinstance(left.get("body"), dict):
        name = "prompt" if left.get("url") == COMPLETIONS_URL else "messages"
        left["body"] = {**left["body"], name: _SMALL[name]}
        objects.append((left["body"], _ASKED_IN_BODY))
    for _ in range(MOST_REFUSALS):
        sentence = _refused(left, line, options)
        if sentence is None:
            return
        yield sentence
        if not any(_drop_culprit(left, one, asked, sentence, line, options) for one, asked in objects):
            return


def _drop_culprit(
    record: dict[str, Any], part: dict[str, Any], asked: set[str], sentence: str, line: int, options: LineOptions
) -> bool:
    """Drop the field of a part of the record without which it is not refused for this reason; False for none."""
    names = [name for name in part if name not in asked]
    for name in sorted(names, key=lambda name: name not in sentence)[:MOST_REFUSALS]:
        value = part.pop(name)
        if _refused(record, line, options) != sentence:
            return True
        part[name] = value
    return False
