"""What each process did when, and tokens by turn: what the drawings read out is what the document says."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.opened import Opened, expect
from tests.browser.shown import agrees, amount
from tests.report.documents import document


def simple(document: dict[str, Any]) -> None:
    """Ten seconds: in the first one request runs, in the second two; none in the sixth. In the eighth two fail."""
    timeline = document["runs"][0]["timelines"][0]
    seconds = [(number + 1) * (number != 5) for number in range(10)]
    timeline.update(seconds=10.0, running=[running for running in seconds for _ in range(40)])
    timeline["failed"] = [0] * 319 + [2] * 81


def read_out(page: Opened, section: str) -> str:
    return page.page.locator(f"{section} .readout").first.inner_text()


def test_the_read_out_is_what_happened_then(open_document: Callable[..., Opened]) -> None:
    """Fault: a time axis that is off, or another column's numbers."""
    made = document(30, processes=1)
    simple(made)
    page = open_document(made)
    place = page.page.locator("#timeline [role=slider]")
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    for second, running, words in ((0.5, 1, ""), (5.5, 0, ""), (9.5, 10, "2 failed until then")):
        page.page.mouse.move(box["x"] + box["width"] * second / 10, box["y"] + box["height"] / 2)
        said = read_out(page, "#timeline")
        first, last = (amount(one)[0] for one in re.match(r"(.*?) to (.*? s)", said).groups())
        assert first <= second <= last + 0.05 and words in said and f"{running} running" in said, said
    page.page.mouse.move(box["x"] + box["width"] * 0.7999, box["y"] + box["height"] / 2)
    assert "2 failed until then" in read_out(page, "#timeline")
    assert page.page.locator("#timeline .failureMark").count() == 1
    assert "in all 2" in page.page.locator("#timeline .lane.failed").inner_text(), "errors over time"


def test_the_read_out_by_keyboard(open_document: Callable[..., Opened]) -> None:
    """Fault: values that only a pointer can read; a slider that does not say where it is."""
    made = document(30, processes=1)
    simple(made)
    page = open_document(made)
    place = page.page.locator("#timeline [role=slider]")
    place.focus()
    page.page.keyboard.press("End")
    said = read_out(page, "#timeline")
    assert all(words in said for words in ("10 running", "2 failed until then")), said
    assert place.get_attribute("aria-valuenow") == place.get_attribute("aria-valuemax")
    assert place.get_attribute("aria-valuetext") == read_out(page, "#timeline")
    page.page.keyboard.press("Home")
    for key, at in (("ArrowLeft", "0"), ("ArrowRight", "1"), ("ArrowLeft", "0")):
        page.page.keyboard.press(key)
        assert place.get_attribute("aria-valuenow") == at
    assert place.get_attribute("aria-valuenow") == "0" and "1 running" in read_out(page, "#timeline")


def test_each_process_has_its_timeline(open_document: Callable[..., Opened]) -> None:
    """Fault: a resumed run shows its first part alone."""
    made = document(30, processes=3)
    timelines = made["runs"][0]["timelines"]
    figures = open_document(made).page.locator("#timeline figure")
    assert figures.count() == len(timelines) == 3
    for figure, timeline in zip(figures.all(), timelines, strict=True):
        took = figure.inner_text().partition("took ")[2].splitlines()[0]
        assert agrees(took, timeline["seconds"])
        most = max(timeline["running"])
        expect(figure).to_contain_text(f"at most {most}")
        for name, seconds in timeline["phases"].items():
            value = figure.locator(f'[data-name="phases.{name}"]').get_attribute("data-value")
            assert float(value) == seconds, name


def test_a_killed_process_says_so(open_document: Callable[..., Opened]) -> None:
    """Fault: a process that was killed has seconds of phases that were not noted."""
    figures = open_document(document(30, unfinished=True)).page.locator("#timeline figure")
    expect(figures.last).to_contain_text("it was killed, or it is still at work")
    expect(figures.first).to_contain_text("load 2.5 s")


def test_the_heights_are_numbers_of_requests(open_document: Callable[..., Opened]) -> None:
    """Fault: a lane is drawn on another's scale, or upside down."""
    made = document(30, processes=1)
    simple(made)
    page = open_document(made)
    heights = page.page.evaluate("""() => ["running", "failed"].map((name) => {
        const box = document.querySelector(`#timeline .lane.${name} path.area`).getBBox();
        return [box.x, box.y, box.width, box.height];
    })""")
    assert heights == [pytest.approx([0, 6, 400, 94], abs=0.5), pytest.approx([319, 6, 81, 94], abs=0.5)]


def test_turns_read_as_the_document(open_document: Callable[..., Opened]) -> None:
    """Fault: cached and computed are changed over, or a turn is left out."""
    made = document(150, random.randrange(1 << 30))
    turns = made["runs"][0]["turns"]
    page = open_document(made)
    bars = page.page.locator("#turns [data-turn]")
    tall = max(c + d for c, d in zip(turns["cached"], turns["computed"], strict=True))
    assert bars.count() == len(turns["turn"])
    page.page.locator("#turns [role=slider]").focus()
    page.page.keyboard.press("Home")
    whole = bars.first.locator(".stack").bounding_box()["height"]
    for at, bar in enumerate(bars.all()):
        assert int(bar.get_attribute("data-turn")) == turns["turn"][at]
        for name in ("cached", "computed"):
            assert int(bar.get_attribute(f"data-{name}")) == turns[name][at]
            height = bar.locator(f".stack > .{name}").bounding_box()["height"]
            assert height == pytest.approx(turns[name][at] / tall * whole, abs=1.5)
        said = read_out(page, "#turns")
        assert said.startswith(f"turn {turns['turn'][at]}:")
        for what, name in (("requests?", "requests"), ("tokens? restored", "cached"), ("computed", "computed")):
            assert agrees(re.search(rf"([\d,]+) {what}", said)[1], turns[name][at]), said
        page.page.keyboard.press("ArrowRight")


def test_the_curve_is_the_one_that_was_given(open_document: Callable[..., Opened]) -> None:
    """Fault: block sizes beside the numbers of others, or another recommendation."""
    made = document(10)
    curve = made["curve"]
    page = open_document(made)
    rows = page.page.locator("#curve [data-block-size]")
    for row, one in zip(rows.all(), curve["candidates"], strict=True):
        cells = [cell.inner_text() for cell in row.locator("th, td").all()]
        assert int(row.get_attribute("data-block-size")) == one["block_size"]
        cached, _, rate = cells[1].partition(" (")
        assert agrees(cached, one["cached_tokens"]) and agrees(rate.rstrip(")"), one["hit_rate"])
        assert agrees(cells[2], one["computed_tokens"]) and agrees(cells[3], one["predicted_s"])
        assert agrees(cells[4], one["measured_s"]) and agrees(cells[5], one["store_bytes"])
        assert ("recommended" in cells[0]) == (one["block_size"] == curve["recommended"]["block_size"])


def test_what_ran_is_what_ran(open_document: Callable[..., Opened]) -> None:
    """Fault: options without their origins, or the command of another process."""
    made = document(10, processes=2)
    processes = made["runs"][0]["ran"]["processes"]
    page = open_document(made)
    articles = page.page.locator("#ran [data-process]")
    for article, process in zip(articles.all(), processes, strict=True):
        for name in ("model", "fingerprint", "version", "dtype"):
            expect(article).to_contain_text(process[name])
        for word in ("AMD EPYC 7B13", "3.12.3", "2.13.0", "7.8 GiB"):
            expect(article).to_contain_text(word)
        article.locator("details summary").first.click()
        rows = [[c.inner_text() for c in row.locator("th, td").all()] for row in article.locator("tbody tr").all()]
        assert sorted((name, origin) for name, _, origin in rows) == sorted(
            (name, origin) for name, _, origin in process["options"]
        )
