"""Everything that is wrong with a line, where a run names the first alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from apcbatch.data.fields import FIELDS
from apcbatch.data.records import BadLine, parse_record
from apcbatch.data.refusals import refusals

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


@pytest.mark.parametrize("shape", ["line", "body"])
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
        found = refusals(record, 3)
        assert set(found) == expected and found[0] == message(record), f"seed {seed}"


def test_values_names_and_messages_come_together() -> None:
    """Fault: messages that are wrong hide the settings behind them, or the other way round."""
    record = {"messages": [{"role": "asistant", "content": ""}], "temprature": 1, "top_p": 7, "stream": True}
    found = refusals(record, 1)
    assert len(found) == 4 and found[0] == message(record)
    for part in ("asistant", "temprature", "top_p is 7", "stream is true"):
        assert any(part in sentence for sentence in found)


@pytest.mark.parametrize("record", [LINE, BODY])
def test_a_good_line_has_none(record: dict[str, Any]) -> None:
    """Fault: a line that is answered is said to be refused."""
    assert refusals(record, 1) == []


@pytest.mark.parametrize("record", [None, 5, [], {}, {"messages": 5}, {"body": 1, "x": 2}, {"conversations": []}])
def test_no_line_at_all_is_one_sentence(record: object) -> None:
    """Fault: an exception for what is no request."""
    assert refusals(record, 1) == [message(record)]


def test_thousands_of_fields_take_no_thousands_of_checks() -> None:
    """Fault: a line with many fields that are wrong keeps the terminal waiting."""
    record = {**LINE, **{f"temperature_{number}": 1 for number in range(900)}, "top_p": 9, "temperatur": 1}
    assert 1 < len(refusals(record, 1)) <= 100
