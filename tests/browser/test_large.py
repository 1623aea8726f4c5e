"""50,000 requests and a tree of thousands of edges: the page opens, answers, and stays small.

benchmarks/report_page.py measures the times; here they are printed, and none is asserted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from apcbatch.report.page import page as make_page
from tests.browser.opened import Opened
from tests.browser.reading import chosen, ordered
from tests.report.documents import large_document

REQUESTS = 50_000
MOST_ELEMENTS = 12_000
MOST_BYTES = 2_000_000


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    return large_document(REQUESTS, seed)


@pytest.fixture(scope="module")
def opened(browser: Any, made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """The page of all of them, opened once."""
    path = tmp_path_factory.mktemp("large") / "large.html"
    path.write_bytes(make_page(made, "large"))
    assert path.stat().st_size < MOST_BYTES
    begin = time.perf_counter()
    page = Opened(browser, path)
    print(f"opened in {time.perf_counter() - begin:.2f} s, {path.stat().st_size:,} bytes")
    yield page
    page.close()


def first_rows(page: Opened) -> list[int]:
    return page.page.evaluate(
        "[...document.querySelectorAll('#requests [data-row]')].map((row) => Number(row.dataset.row))"
    )


def shown(page: Opened) -> int:
    return int(page.page.locator("#requests-count [data-name=shown]").get_attribute("data-value"))


def test_all_are_there_and_few_are_drawn(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: an element a request, and the browser stands still."""
    assert shown(opened) == opened.value("requests") == REQUESTS
    assert opened.page.evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS
    assert 0 < len(first_rows(opened)) < 200


@pytest.mark.parametrize("key", ["prompt", "id", "decode_ms", "answer"])
def test_sorting_all(opened: Opened, made: dict[str, Any], key: str) -> None:
    """Fault: an order of those alone that are drawn."""
    requests = made["runs"][0]["requests"]
    for _ in range(2):
        begin = time.perf_counter()
        opened.page.locator(f'#requests [data-sort="{key}"]').click()
        way = opened.page.locator(f'#requests th:has([data-sort="{key}"])').get_attribute("aria-sort")
        got = first_rows(opened)
        print(f"sorted by {key}, {way}, in {time.perf_counter() - begin:.2f} s")
        assert got == ordered(requests, list(range(REQUESTS)), key, way == "descending")[: len(got)]


def test_filtering_all(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: a filter of those alone that are drawn."""
    for words in ("refund lisbon", "reason:diverged turn:2..4", "error:", "nothing-says-this", ""):
        begin = time.perf_counter()
        opened.page.locator("#requests-filter").fill(words)
        got = shown(opened)
        print(f"filtered by {words!r} in {time.perf_counter() - begin:.2f} s")
        assert got == len(chosen(made["runs"][0]["requests"], words)), words


def test_the_last_row_is_within_reach(opened: Opened) -> None:
    """Fault: 50,000 rows are higher than a browser can scroll, or the end shows nothing."""
    opened.page.locator("#requests-filter").fill("")
    heads = opened.page.locator("#requests th[aria-sort=ascending] button, #requests th[aria-sort=descending] button")
    while heads.count():
        heads.first.click()
    opened.page.locator('#requests [data-row="0"] a').focus()
    opened.page.keyboard.press("End")
    opened.page.locator(f'#requests [data-row="{REQUESTS - 1}"] a').wait_for()
    assert opened.page.evaluate("document.activeElement.closest('[data-row]').dataset.row") == str(REQUESTS - 1)
    assert first_rows(opened)[-1] == REQUESTS - 1
