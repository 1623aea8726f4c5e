"""List all errors of one input line; a run reports only the first.

The checks of data/input/records.py are repeated, each time without the field that caused the previous error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apcbatch.data.conversation import BadLine
from apcbatch.data.input.layouts import ANY_LINE, LineOptions
from apcbatch.data.input.openai_batch import shape_of
from apcbatch.data.input.records import parse_record
from apcbatch.formats import CONTENT_KEYS, VALID_CONTENT

# Fields with the content of a line. Its other fields are settings, harmless fields and columns.
_CONTENT = {"id", "custom_id", "method", "url", *CONTENT_KEYS.values()}
_CONTENT_OF_BODY = {"messages", "prompt"}
MOST_ERRORS = 100


def find_errors(record: object, line: int, options: LineOptions = ANY_LINE) -> list[str]:
    """Return the error sentences of a parsed line, up to MOST_ERRORS. The first is the one that a run reports."""
    first = _error(record, line, options)
    if first is None or not isinstance(record, dict):
        return [] if first is None else [first]
    found = [first]
    for sentence in (*_field_errors(record, line, options), _content_error(record, line, options)):
        if sentence is not None and sentence not in found:
            found.append(sentence)
    return found[:MOST_ERRORS]


def _error(record: object, line: int, options: LineOptions) -> str | None:
    parsed = parse_record(record, line, options)
    return parsed.error.message if isinstance(parsed, BadLine) else None


def _content_error(record: dict[str, Any], line: int, options: LineOptions) -> str | None:
    """Return the first error of the messages or the prompt, with all other fields removed; None without an error."""
    bare = {name: value for name, value in record.items() if name in _CONTENT}
    if isinstance(bare.get("body"), dict):
        bare["body"] = {name: value for name, value in bare["body"].items() if name in _CONTENT_OF_BODY}
    return _error(bare, line, options)


def _field_errors(record: dict[str, Any], line: int, options: LineOptions) -> Iterator[str]:
    """Yield the errors of the other fields, with valid content in place of the line's own."""
    left = {name: VALID_CONTENT.get(name, value) for name, value in record.items()}
    objects = [(left, _CONTENT)]
    if isinstance(left.get("body"), dict):
        name = "prompt" if shape_of(left.get("url"), left["body"]) == "completions" else "messages"
        left["body"] = {**left["body"], name: VALID_CONTENT[name]}
        objects.append((left["body"], _CONTENT_OF_BODY))
    for _ in range(MOST_ERRORS):
        sentence = _error(left, line, options)
        if sentence is None:
            return
        yield sentence
        if not any(_drop_cause(left, one, content, sentence, line, options) for one, content in objects):
            return


def _drop_cause(
    record: dict[str, Any], part: dict[str, Any], content: set[str], sentence: str, line: int, options: LineOptions
) -> bool:
    """Remove the field that causes the error from `part`; return False if no field does.

    part: the record or its body. content: names that are not removed. sentence: the error."""
    names = [name for name in part if name not in content]
    for name in sorted(names, key=lambda name: name not in sentence)[:MOST_ERRORS]:
        value = part.pop(name)
        if _error(record, line, options) != sentence:
            return True
        part[name] = value
    return False
