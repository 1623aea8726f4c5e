"""Narrow, wide, dark and on paper: nothing juts out, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.opened import Opened, expect
from tests.report.documents import document

# What is wider than the page and not inside something that scrolls by itself.
JUTTING = """() => {
    const width = document.documentElement.clientWidth;
    const scrolls = (one) => one && one !== document.body
        && (getComputedStyle(one).overflowX !== "visible" || scrolls(one.parentElement));
    const out = [...document.querySelectorAll("body *")].filter((one) => {
        const box = one.getBoundingClientRect();
        return box.width > 0 && (box.right > width + 1 || box.left < -1) && !scrolls(one.parentElement)
            && getComputedStyle(one).position !== "absolute";
    });
    return out.map((one) => one.outerHTML.slice(0, 100));
}"""
SCROLLS = "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
# Texts that are cut off without an ellipsis or a way to scroll.
CUT = """() => [...document.querySelectorAll("main button, main dd, main dt, main h2, main h3, main p, main li")]
    .filter((one) => one.offsetParent !== null && one.scrollWidth > one.clientWidth + 1
        && getComputedStyle(one).display !== "inline" && getComputedStyle(one).overflowX === "hidden"
        && getComputedStyle(one).textOverflow !== "ellipsis" && !one.closest("[role=tree]"))
    .map((one) => one.outerHTML.slice(0, 100))"""


@pytest.mark.parametrize("width", [320, 400, 700, 1100, 2000])
def test_nothing_is_wider_than_the_page(open_document: Callable[..., Opened], width: int) -> None:
    """Fault: a long id, a command or a table pushes the page sideways, and numbers leave the screen."""
    page = open_document(document(120, seed=width), viewport={"width": width, "height": 900})
    row = page.page.locator("#requests [data-row]").first
    row.click()
    expect(page.page.locator("#request-detail")).to_be_visible()
    assert page.page.evaluate(SCROLLS) <= 0, page.page.evaluate(JUTTING)
    assert page.page.evaluate(JUTTING) == []
    assert page.page.evaluate(CUT) == []


def test_nothing_has_to_be_moved_sideways_on_a_telephone(open_document: Callable[..., Opened]) -> None:
    """Fault: at 400 pixels the page fits, and its tables, its links and the requests lie beyond the edge of boxes that
    scroll: of a comparison one saw the first run alone, of the requests their ids."""
    made = document(120, hostile=False, runs=2)
    page = open_document(made, "#run=1", viewport={"width": 400, "height": 900})
    page.page.locator("#requests [data-row]").first.click()
    beyond = page.page.evaluate("""() => [...document.querySelectorAll("body *")].filter((one) => one.offsetParent
        && ["auto", "scroll"].includes(getComputedStyle(one).overflowX) && one.scrollWidth > one.clientWidth + 1)
        .map((one) => one.outerHTML.slice(0, 100))""")
    assert beyond == []
    heads = page.page.locator("#requests thead button:visible").all_inner_texts()
    assert heads == ["Request", "Answer", "Restored"]


def test_words_of_any_length_break(open_document: Callable[..., Opened]) -> None:
    """Fault: one id of 400 letters makes the table, and the page, 4,000 pixels wide."""
    made = document(30, hostile=False)
    run = made["runs"][0]
    run["name"] = "out/" + "n" * 400 + ".jsonl"
    run["requests"]["id"][0] = "i" * 400
    run["requests"]["answer"][0] = "a" * 4000
    run["verdict"]["warnings"] = ["w" * 600]
    run["verdict"]["continue"] = "apcbatch run " + "c" * 500
    run["tokens"]["misses"][0]["remedy"] = "r" * 300
    run["ran"]["processes"][0]["command"] += " " + "p" * 500
    page = open_document(made, viewport={"width": 400, "height": 900})
    page.page.locator("#requests [data-row]").first.click()
    assert page.page.evaluate(SCROLLS) <= 0, page.page.evaluate(JUTTING)


def test_on_paper_everything_unfolds(open_document: Callable[..., Opened]) -> None:
    """Fault: the print shows the slice of the table that was on the screen, controls, or white text on white."""
    made = document(120)
    page = open_document(made, color_scheme="dark")
    page.page.emulate_media(media="print")
    for name in ("verdict", "tokens", "tree", "timeline", "turns", "drafts", "curve", "requests", "comparison", "ran"):
        expect(page.page.locator(f"#{name}")).to_be_visible()
    expect(page.page.locator("#requests-filter")).to_be_hidden()
    assert page.page.locator("details:not([open])").count() == 0
    background = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background in ("rgb(255, 255, 255)", "rgba(0, 0, 0, 0)"), "ink on a whole page"
    paper = page.page.pdf()
    assert paper.startswith(b"%PDF") and len(paper) > 10_000


def test_dark_is_dark_and_light_is_light(open_document: Callable[..., Opened]) -> None:
    """Fault: the page does not follow the reader's system."""
    lightness = {}
    for scheme in ("light", "dark"):
        page = open_document(document(10), color_scheme=scheme)
        colour = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness[scheme] = sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(", ")))
    assert lightness["light"] > 690 and lightness["dark"] < 150


def test_who_wants_no_motion_gets_none(open_document: Callable[..., Opened]) -> None:
    """Fault: zooming moves things for those whom motion makes ill."""
    page = open_document(document(100), reduced_motion="reduce")
    moving = page.page.evaluate("""() => [...document.querySelectorAll("body *")].filter((one) => {
        const style = getComputedStyle(one);
        return [style.transitionDuration, style.animationDuration]
            .some((d) => d.split(", ").some((s) => parseFloat(s) > 0.01));
    }).map((one) => one.outerHTML.slice(0, 80))""")
    assert moving == []
