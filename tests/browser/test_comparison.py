"""Runs side by side: whether they answered alike, and the selector that shows the other run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.browser.opened import Opened, expect
from tests.browser.shown import agrees
from tests.report.documents import document


def test_equal_answers_are_said_to_be_equal(open_document: Callable[..., Opened]) -> None:
    """Fault: the promise of the same bits is kept, and the page does not say so, or says so of half of them."""
    made = document(80, random.randrange(1 << 30))
    page = open_document(made)
    one = page.page.locator("#comparison [data-comparison='1']")
    expect(one.locator("[data-same]")).to_have_attribute("data-same", "yes")
    expect(one).to_contain_text("bit for bit, 80 of 80")
    assert page.value("same_answers", "#comparison") == page.value("both", "#comparison") == 80


def test_different_answers_are_listed_with_links_to_both(open_document: Callable[..., Opened]) -> None:
    """Fault: answers differ and the page says yes; a link that leads to the other run's other request."""
    made = document(80, random.randrange(1 << 30), runs=3, hostile=False)
    comparison = made["comparisons"][1]
    assert comparison["different"]
    page = open_document(made)
    one = page.page.locator("#comparison [data-comparison='2']")
    expect(one.locator("[data-same]")).to_have_attribute("data-same", "no")
    assert float(one.locator("[data-name=different_count]").first.get_attribute("data-value")) == len(
        comparison["different"]
    )
    rows = one.locator(".differences tbody tr")
    assert rows.count() == len(comparison["different"])
    for number, different in enumerate(comparison["different"]):
        said = rows.nth(number).inner_text()
        assert different["id"] in said
        assert ("error" in said) if different["at"] < 0 else (f"token {different['at']}" in said)
    for which, run in ((0, 0), (1, 2)):
        rows.nth(2).locator("a").nth(which).click()
        expect(page.page.locator("#run")).to_have_value(str(run))
        opened = page.page.locator("#request-detail [data-request]")
        expect(opened).to_have_attribute("data-request", comparison["different"][2]["id"])
        page.page.go_back()


def test_measures_misses_and_options_stand_side_by_side(open_document: Callable[..., Opened]) -> None:
    """Fault: the two columns are changed over, or the change has the wrong sign."""
    made = document(80, random.randrange(1 << 30), hostile=False)
    comparison = made["comparisons"][0]
    tables = open_document(made).page.locator("#comparison table").all()
    measures, misses, options = (
        [[cell.inner_text() for cell in row.locator("th, td").all()] for row in table.locator("tbody tr").all()]
        for table in tables
    )
    for said, row in zip(measures, comparison["rows"], strict=True):
        assert said[0] == row["name"] and agrees(said[1], row["base"]) and agrees(said[2], row["other"])
        if row["base"] and 0.5 < row["other"] / row["base"] < 2 and row["other"] != row["base"]:
            ratio = row["other"] / row["base"] - 1
            assert said[3][0] == ("+" if ratio > 0 else "−") and agrees(said[3][1:], abs(ratio)), said
    for said, miss in zip(misses, comparison["misses"], strict=True):
        assert said[0] == miss["reason"] and agrees(said[1], miss["base"]) and agrees(said[2], miss["other"])
    assert [
        [option["name"], str(option["base"]), str(option["other"])] for option in comparison["changed_options"]
    ] == options


def test_runs_with_nothing_in_common(open_document: Callable[..., Opened]) -> None:
    """Fault: no request in common reads as all answers the same."""
    made = document(10)
    made["comparisons"][0].update(both=0, same_answers=0, only_base=10, only_other=12, different=[], different_count=0)
    section = open_document(made).page.locator("#comparison")
    expect(section).to_contain_text("no request in common")
    expect(section).to_contain_text("12 requests only in")
    assert "bit for bit" not in section.inner_text()


def test_the_selector_shows_another_run(open_document: Callable[..., Opened]) -> None:
    """Fault: half of the page stays that of the first run, or the choice is not in the link."""
    made = document(60, random.randrange(1 << 30))
    page = open_document(made)
    selector = page.page.locator("#run")
    for said, run in zip(selector.locator("option").all_inner_texts(), made["runs"], strict=True):
        assert run["name"] in said
    for number in (1, 0):
        selector.select_option(str(number))
        run = made["runs"][number]
        for name in ("cached_tokens", "computed_tokens", "hit_rate"):
            assert page.value(name) == run["verdict"][name]
        assert float(page.page.locator("#tokens [data-part=disk]").get_attribute("data-value")) == run["tokens"]["disk"]
        heads = page.page.locator("#requests [data-sort]").evaluate_all("(all) => all.map((one) => one.dataset.sort)")
        cell = page.page.locator('#requests [data-row="3"] > *').nth(heads.index("cached"))
        assert float(cell.get_attribute("data-value")) == run["requests"]["cached"][3]
    page.page.go_back()
    expect(selector).to_have_value("1")
    linked = open_document(made, fragment="#" + page.page.url.partition("#")[2])
    assert linked.value("cached_tokens") == made["runs"][1]["verdict"]["cached_tokens"]


def test_one_run_needs_no_selector(open_document: Callable[..., Opened]) -> None:
    """Fault: a choice between one thing."""
    page = open_document(document(10, runs=1))
    expect(page.page.locator("#run")).to_be_hidden()


def test_a_link_to_an_answer_whose_id_is_there_twice(open_document: Callable[..., Opened]) -> None:
    """Fault: lines without a custom_id have one id for all their turns, and the link leads to the first of them."""
    made = document(80, random.randrange(1 << 30), runs=3, hostile=False)
    different = made["comparisons"][1]["different"][-1]
    for run in made["runs"]:
        run["requests"]["id"] = ["line-1"] * 80
    page = open_document(made)
    links = page.page.locator("#comparison [data-comparison='2'] .differences tbody tr").last.locator("a")
    for link, row in zip(links.all(), (different["base_row"], different["other_row"]), strict=True):
        assert link.get_attribute("href").endswith(f"request=row:{row}" if row else "request=line-1")


@pytest.mark.parametrize(
    "failed, is_other, mood, said",
    [
        (0, False, "bad", "Same answers: no, 7 of 9 are equal, 2 differ."),
        (1, False, "bad", "Same answers: no, 7 of 9 are equal, 2 differ, of which 1 failed in a run."),
        (
            2,
            False,
            "fair",
            "Same answers: yes, where both answered, 7 of 9 are equal, 2 differ, of which 2 failed in a run.",
        ),
        (0, True, "fair", "Two models. Same answers: no, 7 of 9 are equal, 2 differ."),
    ],
)
def test_a_cross_is_for_wrong_answers_alone(
    open_document: Callable[..., Opened], failed: int, is_other: bool, mood: str, said: str
) -> None:
    """Fault: two models, or a request that failed in one run, get a red cross."""
    made = document(80, random.randrange(1 << 30))
    numbers = {"both": 9, "same_answers": 7, "different": [], "different_count": 2}
    made["comparisons"][0].update(numbers, failed_count=failed, other_model=is_other)
    ending = open_document(made).page.locator("#comparison .ending").first
    expect(ending).to_have_class(f"ending {mood}")
    expect(ending).to_contain_text(said)
