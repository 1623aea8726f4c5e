"""The reading of shown numbers, which the other tests here rely on. Needs no browser."""

from __future__ import annotations

import pytest

from tests.browser.shown import agrees

RIGHT = [
    ("1,494,719 tokens", 1494719), ("1 token", 1), ("0", 0), ("3.2 GiB", 3435973837), ("87.3 %", 0.8731), ("100 %", 1),
    ("12.3 ms", 0.0123), ("8.3 s", 8.31), ("4 min 12 s", 252.4), ("1 h 7 min", 4000), ("2,302 tokens/s", 2301.5),
    ("under 0.1 %", 0.0004), ("over 99.9 %", 0.9999), ("–", None), ("-3 tokens", -3),
]  # fmt: skip
WRONG = [
    ("1,494,718 tokens", 1494719), ("3.3 GiB", 3435973837), ("100 %", 0.9), ("0 %", 0.01), ("9 s", 8.31),
    ("under 0.1 %", 0), ("under 0.1 %", 0.2), ("over 99.9 %", 0.5), ("–", 0), ("0", None), ("1 h 8 min", 4000),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), RIGHT)
def test_what_a_reader_may_be_told(text: str, value: float | None) -> None:
    """Fault: a right number is refused, so that a form is taken out of the comparison."""
    assert agrees(text, value)


@pytest.mark.parametrize(("text", "value"), WRONG)
def test_what_a_reader_must_not_be_told(text: str, value: float | None) -> None:
    """Fault: a wrong number on the page passes."""
    assert not agrees(text, value)


@pytest.mark.parametrize("text", ["1494719", "1,49,4719", "12 parsecs", "NaN", "[object Object]", "many"])
def test_what_is_no_number_is_refused(text: str) -> None:
    """Fault: `NaN tokens` is on the page, and nobody minds."""
    with pytest.raises(ValueError):
        agrees(text, 1494719)
