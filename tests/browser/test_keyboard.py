"""The whole page without a pointer: every control is reached by Tab in the order of the page, shows that it has the
focus, and does its work by keys. The tree, the rows and the timelines have more keys, which their own tests press.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.browser.opened import Opened, expect
from tests.report.documents import document

# What has the focus: what kind, its name, the section it is in, whether it can be seen to have it, and whether it is in
# sight.
FOCUSED = """() => {
    const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
    return {
        what: one.dataset.sort ?? one.id ?? "", tag: one.localName, section: one.closest("section, header")?.id ?? "",
        ring: (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1) || style.boxShadow !== "none",
        seen: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
        name: one.id || one.dataset.node || one.dataset.row || one.textContent.trim().slice(0, 30),
        end: one === document.body,
    };
}"""
CONTROLS = """() => [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")]
    .filter((one) => one.checkVisibility() && !one.disabled && one.tabIndex >= 0).length"""


def test_every_control_is_reached_in_the_order_of_the_page(open_document: Callable[..., Opened]) -> None:
    """Fault: a control that Tab passes over, a trap that Tab does not leave, an invisible focus."""
    page = open_document(document(12, 1, unfinished=True), reduced_motion="reduce")  # it scrolls at once
    wanted = page.page.evaluate(CONTROLS)
    walked = []
    for _ in range(wanted * 2):
        page.page.keyboard.press("Tab")
        at = page.page.evaluate(FOCUSED)
        if at["end"]:
            break
        walked.append(at)
    assert len(walked) >= wanted * 0.9, "radio buttons of one group count once, all else is reached"
    assert [one["name"] for one in walked if not one["ring"]] == []
    assert [one["name"] for one in walked if not one["seen"]] == []
    sections = list(dict.fromkeys(one["section"] for one in walked if one["section"]))
    order = ["verdict", "tokens", "tree", "timeline", "turns", "drafts", "curve", "requests", "comparison", "ran"]
    assert sections == [name for name in order if name in sections]
    assert {"tree", "timeline", "turns", "requests", "comparison"} <= set(sections)


def test_a_reader_without_a_pointer_finds_a_request(open_document: Callable[..., Opened]) -> None:
    """Fault: one step of the usual way needs the pointer: skip the head, choose the run, filter, sort, open, close."""
    made = document(60, 1, hostile=False)
    page = open_document(made)
    keys = page.page.keyboard
    keys.press("Tab")
    keys.press("Enter")  # the link that skips the head
    assert page.page.locator("#verdict").evaluate("(one) => one.getBoundingClientRect().top") < 200
    page.page.locator("#run").focus()
    keys.press("ArrowDown")
    expect(page.page.locator("#run")).to_have_value("1")
    assert page.value("cached_tokens") == made["runs"][1]["verdict"]["cached_tokens"]
    page.page.locator("#requests-filter").focus()
    keys.type("turn:1")
    while page.page.evaluate("document.activeElement.dataset.sort") != "prompt":
        keys.press("Tab")
    keys.press("Enter")
    head = page.page.locator('#requests th:has([data-sort="prompt"])')
    expect(head).to_have_attribute("aria-sort", "descending")
    keys.press("Space")
    expect(head).to_have_attribute("aria-sort", "ascending")
    while not page.page.evaluate("document.activeElement.closest('[data-row]')"):
        keys.press("Tab")
    first = page.page.evaluate("Number(document.activeElement.closest('[data-row]').dataset.row)")
    requests = made["runs"][1]["requests"]
    assert requests["prompt"][first] == min(
        p for p, turn in zip(requests["prompt"], requests["turn"], strict=True) if turn == 1
    )
    keys.press("Enter")
    opened = page.page.locator("#request-detail [data-request]")
    expect(opened).to_have_attribute("data-request", requests["id"][first])
    keys.press("Escape")
    expect(page.page.locator("#request-detail")).to_be_hidden()
    assert page.page.locator("#run").input_value() == "1", "the run is still the chosen one"
