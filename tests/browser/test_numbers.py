"""Every number on the page is the document's, raw and as it reads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.opened import Opened
from tests.browser.shown import agrees
from tests.report.documents import document

COUNTS = (
    "requests", "ok", "errors", "prompt_tokens", "cached_tokens", "computed_tokens", "ideal_tokens",
    "completion_tokens", "hit_rate", "ideal_hit_rate",
)  # fmt: skip
MEASURES = ("exit_code", "prefill_tokens_per_s", "decode_tokens_per_s", "peak_rss_bytes")
# [name, value in the unit of shown.py, words]; what is called _ms is in milliseconds.
NUMBERS = """() => [...document.querySelectorAll("[data-name][data-value]")].map(({ dataset, innerText }) =>
    [dataset.name, Number(dataset.value) / (dataset.name.endsWith("_ms") ? 1000 : 1), innerText])"""


def known(number: list[Any]) -> float | None:
    """The value; None for what the document marks as unknown: an ideal of -1, a turn of 0."""
    name, value, _ = number
    return None if (name == "ideal" and value < 0) or (name == "turn" and value == 0) else value


@pytest.fixture
def seed() -> int:
    """A fresh one each time; printed, so that a failure can be repeated."""
    drawn = random.randrange(1 << 30)
    print(f"seed {drawn}")
    return drawn


def test_the_verdict_is_the_documents(open_document: Callable[..., Opened], seed: int) -> None:
    """Fault: a number is taken from another key, is added up anew, or is left out."""
    made = document(random.Random(seed).randrange(1, 400), seed)
    verdict = made["runs"][0]["verdict"]
    page = open_document(made)
    for name in (*COUNTS, *MEASURES):
        assert page.value(name) == verdict[name], name
    for name, seconds in verdict["seconds"].items():
        assert page.value(f"seconds.{name}") == seconds, name


def test_the_tokens_are_the_documents(open_document: Callable[..., Opened], seed: int) -> None:
    """Fault: a part of the bar has the value or the width of another one, or the ideal's mark is beside its place."""
    made = document(random.Random(seed).randrange(1, 400), seed)
    tokens = made["runs"][0]["tokens"]
    page = open_document(made)
    bar = page.page.locator("#tokens .bar").bounding_box()
    total = tokens["computed"] + tokens["memory"] + tokens["disk"]
    for name in ("computed", "memory", "disk", "lost", "ideal"):
        part = page.page.locator(f"#tokens [data-part={name}]")
        if tokens[name] == 0 and part.count() == 0:
            continue
        assert float(part.get_attribute("data-value")) == tokens[name], name
        if name != "ideal":
            assert part.bounding_box()["width"] / bar["width"] == pytest.approx(tokens[name] / total, abs=0.005), name
    restored = tokens["memory"] + tokens["disk"]
    lost = page.page.locator("#tokens [data-part=lost]").bounding_box()
    assert (lost["x"] - bar["x"]) / bar["width"] == pytest.approx(restored / total, abs=0.005)
    mark = page.page.locator("#tokens [data-part=ideal]").evaluate("(one) => one.getBoundingClientRect().left")
    assert (mark - bar["x"]) / bar["width"] == pytest.approx(tokens["ideal"] / total, abs=0.01)


def test_each_miss_has_its_number_and_its_remedy(open_document: Callable[..., Opened], seed: int) -> None:
    """Fault: the reasons are in another order than their losses, or a remedy stands beside another reason."""
    made = document(300, seed)
    for number, miss in enumerate(made["runs"][0]["tokens"]["misses"]):
        miss["remedy"] = f"Remedy number {number}."
    rows = open_document(made).page.locator("#tokens [data-miss]")
    for row, miss in zip(rows.all(), made["runs"][0]["tokens"]["misses"], strict=True):
        reason, requests, lost, remedy = (cell.inner_text() for cell in row.locator("th, td").all())
        assert (reason, remedy) == (miss["reason"], miss["remedy"])
        assert agrees(requests, miss["requests"]) and agrees(lost, miss["tokens"])


def test_each_number_reads_as_what_stands_behind_it(open_document: Callable[..., Opened], seed: int) -> None:
    """Fault: a wrong unit, a slipped point, or a rounding that makes 99.96 % all of it."""
    page = open_document(document(random.Random(seed).randrange(1, 400), seed))
    numbers = page.page.evaluate(NUMBERS)
    assert len(numbers) > 20
    wrong = [one for one in numbers if not agrees(one[2], known(one))]
    assert not wrong


def test_numbers_of_any_size_read_right(open_document: Callable[..., Opened], seed: int) -> None:
    """Fault: 1,023.99 KiB, 60 s that are a minute, a rate of 0, or 1 token that is many."""
    draw = random.Random(seed)
    for _ in range(4):
        made = document(3, seed, runs=1, errors=False)
        verdict, span = made["runs"][0]["verdict"], draw.choice((1, 60, 3_600, 10**6, 10**12))
        for name in (
            "prompt_tokens",
            "cached_tokens",
            "computed_tokens",
            "completion_tokens",
            "peak_rss_bytes",
            "store_skipped",
        ):
            verdict[name] = draw.choice((0, 1, draw.randrange(span), 1 << draw.randrange(45), (1 << 20) - 1))
        for name in ("hit_rate", "ideal_hit_rate"):
            verdict[name] = draw.choice((0.0, 1.0, 0.0004, 0.99961, 0.9996, draw.random()))
        for name in verdict["seconds"]:
            verdict["seconds"][name] = draw.choice((0.0, 0.00004, 59.96, 119.99, 3_599.9, draw.random() * span))
        page = open_document(made)
        wrong = [one for one in page.page.evaluate(NUMBERS) if not agrees(one[2], known(one))]
        assert not wrong
        page.context.close()


def test_what_is_not_known_is_not_made_up(open_document: Callable[..., Opened], seed: int) -> None:
    """Fault: an unknown number reads 0, null or NaN."""
    made = document(20, seed, entries=False, tree=False)
    verdict = made["runs"][0]["verdict"]
    unknown = ("ideal_tokens", "ideal_hit_rate", "peak_rss_bytes", "seconds", "exit_code", "store_skipped")
    verdict.update(dict.fromkeys(unknown))
    made["runs"][0]["tokens"].update(lost=None, ideal=None, misses=[])
    page = open_document(made)
    for name in (*unknown, "seconds.total"):
        assert page.page.locator(f'[data-name="{name}"][data-value]').count() == 0, name
    said = page.page.inner_text("main")
    assert not [word for word in ("null", "NaN", "undefined", "[object", "Infinity") if word in said]
