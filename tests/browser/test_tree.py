"""The prefix tree as an icicle: what a box shows, and how the reader moves among the edges."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.opened import Locator, Opened, expect
from tests.browser.shown import agrees
from tests.report.documents import document

DETAILS = ("begin", "end", "requests", "restored", "computed")
BOXES = """() => [...document.querySelectorAll("#tree [data-node]")].map((one) => {
    const box = one.getBoundingClientRect();
    return [Number(one.dataset.node), box.left, box.width, box.top, box.height];
})"""


def saved(edges: dict[str, list[Any]]) -> list[int]:
    """The tokens that each edge and all below it saved."""
    sums = list(edges["restored"])
    for node in range(len(sums) - 1, 0, -1):
        sums[edges["parent"][node]] += sums[node]
    return sums


def box(page: Opened, node: int) -> Locator:
    return page.page.locator(f'#tree [data-node="{node}"]')


def shown(page: Opened) -> int:
    """The node that the details are of."""
    return int(page.page.locator("#edge [data-edge]").get_attribute("data-edge"))


def assert_details(page: Opened, edges: dict[str, list[Any]], node: int) -> None:
    assert shown(page) == node
    for name in DETAILS:
        if name in ("begin", "end") and node == 0:
            continue
        assert page.value(name, "#edge") == edges[name][node], name
    assert page.value("saved", "#edge") == saved(edges)[node]


def test_widths_are_in_proportion_to_tokens_saved(open_document: Callable[..., Opened]) -> None:
    """Fault: a width that counts requests, or tokens of the edge alone; a child that juts out of its parent."""
    made = document(300, random.randrange(1 << 30), hostile=False)
    edges = made["runs"][0]["tree"]
    sums = saved(edges)
    boxes = {int(node): rest for node, *rest in open_document(made).page.evaluate(BOXES)}
    assert len(boxes) > 20 and 0 in boxes
    left, whole = boxes[0][:2]
    for node, (x, width, *_) in boxes.items():
        assert width / whole == pytest.approx(sums[node] / sums[0], abs=2 / whole), node
        if node:
            outer = boxes[edges["parent"][node]]
            assert x >= outer[0] - 1 and x + width <= outer[0] + outer[1] + 1, node
    assert left >= 0


def test_heights_are_positions(open_document: Callable[..., Opened]) -> None:
    """Fault: every edge has the height of one level, and a prompt of 2,000 tokens looks like one of 20."""
    made = document(300, random.randrange(1 << 30))
    edges = made["runs"][0]["tree"]
    boxes = {int(node): rest for node, *rest in open_document(made).page.evaluate(BOXES) if node}
    scales = [rest[3] / (edges["end"][node] - edges["begin"][node]) for node, rest in boxes.items()]
    assert max(scales) - min(scales) <= 2 / min(edges["end"][n] - edges["begin"][n] for n in boxes)
    for node, (_, _, top, height) in boxes.items():
        for child in (n for n in boxes if edges["parent"][n] == node):
            assert boxes[child][2] == pytest.approx(top + height, abs=1.5), (node, child)


def test_a_click_zooms_and_shows_the_edge(open_document: Callable[..., Opened]) -> None:
    """Fault: another node's numbers beside an edge, or a zoom that cannot be left."""
    made = document(300, random.randrange(1 << 30))
    edges = made["runs"][0]["tree"]
    page = open_document(made)
    whole = box(page, 0).bounding_box()["width"]
    expect(page.page.locator("#tree-reset")).to_be_disabled()
    for _ in range(3):
        top = shown(page)
        wide = [int(node) for node, _, width, _, height in page.page.evaluate(BOXES) if width > 20 and height > 4]
        below = [node for node in wide if node not in (0, top)]
        if not below:
            break
        node = random.choice(below)
        box(page, node).click()
        assert_details(page, edges, node)
        assert box(page, node).bounding_box()["width"] == pytest.approx(whole, abs=2)
        assert f"tree={node}" in page.page.url
    page.page.locator("#tree-reset").click()
    assert shown(page) == 0 and box(page, 0).bounding_box()["width"] == pytest.approx(whole, abs=2)


def test_the_keyboard_walks_and_zooms(open_document: Callable[..., Opened]) -> None:
    """Fault: the picture is for pointers alone."""
    made = document(300, random.randrange(1 << 30))
    edges = made["runs"][0]["tree"]
    page = open_document(made)
    keys = page.page.keyboard
    box(page, 0).focus()
    keys.press("ArrowDown")
    first = int(page.page.evaluate("document.activeElement.dataset.node"))
    assert edges["parent"][first] == 0
    assert_details(page, edges, first)
    keys.press("ArrowRight")
    second = int(page.page.evaluate("document.activeElement.dataset.node"))
    assert edges["parent"][second] == 0
    keys.press("ArrowLeft")
    keys.press("Enter")
    assert f"tree={first}" in page.page.url
    assert_details(page, edges, first)
    assert int(page.page.evaluate("document.activeElement.dataset.node")) == first, "the focus is lost by the zoom"
    keys.press("Backspace")
    assert "tree=" not in page.page.url.replace("tree=0", "")
    keys.press("ArrowDown")
    keys.press("Enter")
    keys.press("Escape")
    assert shown(page) == 0


def test_a_link_to_a_edge_and_the_back_button(open_document: Callable[..., Opened]) -> None:
    """Fault: a colleague who gets the link sees the whole tree; a step back leaves the report."""
    made = document(300, 5)
    edges = made["runs"][0]["tree"]
    node = max(range(1, len(edges["parent"])), key=lambda n: saved(edges)[n])
    page = open_document(made, fragment=f"#tree={node}")
    assert_details(page, edges, node)
    page.page.locator("#tree-reset").click()
    assert shown(page) == 0
    page.page.go_back()
    expect(page.page.locator(f'#edge [data-edge="{node}"]')).to_be_visible()
    page.page.go_forward()
    expect(page.page.locator('#edge [data-edge="0"]')).to_be_visible()


@pytest.mark.parametrize("fragment", ["#tree=99999", "#tree=-1", "#tree=x", "#tree=1.5", "#tree=__proto__"])
def test_a_link_to_no_edge_shows_the_whole_tree(open_document: Callable[..., Opened], fragment: str) -> None:
    """Fault: an old link ends in an error and an empty page."""
    assert shown(open_document(document(40, 1), fragment=fragment)) == 0


def test_each_edge_says_in_words_what_its_colour_means(open_document: Callable[..., Opened]) -> None:
    """Fault: who does not see colours, or the page, does not learn what was restored."""
    made = document(100, random.randrange(1 << 30), hostile=False)
    edges = made["runs"][0]["tree"]
    for one in open_document(made).page.locator("#tree [role=treeitem]").all():
        node, label = int(one.get_attribute("data-node")), one.get_attribute("aria-label")
        if node:
            restored = label.partition(" restored")[0].rpartition(", ")[2]
            computed = label.rpartition(", ")[2].partition(" computed")[0]
            assert agrees(restored, edges["restored"][node]) and agrees(computed, edges["computed"][node]), label
