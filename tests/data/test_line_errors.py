"""All errors of a line, where a run reports only the first."""

from __future__ import annotations

import copy
import random
from typing import Any

from apcbatch.data.checks import first_line, one_of, shown, shown_keys
from apcbatch.data.conversation import BadLine
from apcbatch.data.fields import FIELDS
from apcbatch.data.input.line_errors import find_errors
from apcbatch.data.input.records import parse_record
from tests.effort import table

LINE: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BODY: dict[str, Any] = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": LINE}
REFUSED = [
    field.name for field in FIELDS
    if field.kind == "refused" and "messages" in field.shapes and "chat" in field.shapes
]  # fmt: skip


def message(record: object) -> str:
    parsed = parse_record(record, 3)
    assert isinstance(parsed, BadLine)
    return parsed.error.message


@table("shape", ["line", "body"])
def test_each_field_is_named_as_it_would_be_alone(shape: str) -> None:
    """Fault: one refusal hides another, or a sentence is made up."""
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    for _ in range(20):
        names = draw.sample(REFUSED, draw.randrange(1, 8))
        record = copy.deepcopy(LINE if shape == "line" else BODY)
        part = record if shape == "line" else record["body"]
        expected = set()
        for name in names:
            alone = copy.deepcopy(LINE if shape == "line" else BODY)
            (alone if shape == "line" else alone["body"])[name] = {"odd": 1}
            part[name] = {"odd": 1}
            expected.add(message(alone))
        found = find_errors(record, 3)
        assert set(found) == expected and found[0] == message(record), f"seed {seed}"


def test_values_names_and_messages_come_together() -> None:
    """Fault: messages that are wrong hide the settings behind them, or the other way round."""
    record = {"messages": [{"role": "asistant", "content": ""}], "temprature": 1, "top_p": 7, "stream": True}
    found = find_errors(record, 1)
    assert len(found) == 4 and found[0] == message(record)
    for part in ("asistant", "temprature", "top_p is 7", "stream is true"):
        assert any(part in sentence for sentence in found)


@table("record", [LINE, BODY])
def test_a_good_line_has_none(record: dict[str, Any]) -> None:
    """Fault: a line that is answered is said to be refused."""
    assert find_errors(record, 1) == []


@table("record", [None, 5, [], {}, {"messages": 5}, {"body": 1, "x": 2}, {"conversations": []}])
def test_no_line_at_all_is_one_sentence(record: object) -> None:
    """Fault: an exception for what is no request."""
    assert find_errors(record, 1) == [message(record)]


def test_thousands_of_fields_take_no_thousands_of_checks() -> None:
    """Fault: a line with many fields that are wrong keeps the terminal waiting."""
    record = {**LINE, **{f"temperature_{number}": 1 for number in range(900)}, "top_p": 9, "temperatur": 1}
    assert len(find_errors(record, 1)) == 100


@table("value, text", [
    ("x" * 40, f'"{"x" * 40}"'), ("x" * 41, f'"{"x" * 37}..."'), ("\ud800", '"?"'), (10**50, f"1{'0' * 39}"),
    ((1,), "a list"), ({1}, "a set"), (True, "true"),
])  # fmt: skip
def test_a_value_is_shown_in_a_few_characters(value: object, text: str) -> None:
    """Fault: a sentence of a megabyte, one that is cut for no need, or true called 1."""
    assert shown(value) == text


def test_lists_in_sentences_are_short() -> None:
    """Fault: a sentence with all keys of a line, or with the whole output of a library."""
    assert shown_keys("abcdefgh") == '"a", "b", "c", "d", "e", "f", "g", "h"' == shown_keys("abcdefghi")
    assert shown_keys([]) == "none"
    assert [one_of("abc"[:count]) for count in (1, 2, 3)] == ["a", "a or b", "a, b or c"]
    assert first_line("\n " + "x" * 301 + ".\nmore") == "x" * 300 and first_line("a.\nb") == "a"
    assert first_line(KeyError()) == "KeyError"
