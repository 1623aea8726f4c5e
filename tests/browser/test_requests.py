"""The table of requests: its order, its filter, an opened row, and links to all of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.opened import Opened, expect
from tests.browser.reading import NUMBERS, SOURCES, chosen, number, ordered, text
from tests.browser.shown import agrees
from tests.report.documents import document
from tests.report.runs import HOSTILE

SORTS = ("line", "id", "turn", "prompt", "cached", "ideal", "computed", "from", "reason", "out", "prefill_ms",
         "decode_ms", "finish", "answer")  # fmt: skip
ROWS = "[...document.querySelectorAll('#requests [data-row]')].map((row) => Number(row.dataset.row))"


def rows(page: Opened) -> list[int]:
    """All rows of the table, in its order: the reader scrolls from its top to its end."""
    found: list[int] = []
    page.page.evaluate("document.querySelector('#requests .rows').scrollTop = 0")
    while True:
        page.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found += [row for row in page.page.evaluate(ROWS) if row not in found]
        if page.page.evaluate("""() => {
            const view = document.querySelector("#requests .rows"), before = view.scrollTop;
            view.scrollTop += view.clientHeight;
            return view.scrollTop === before;
        }"""):
            return found


def write_filter(page: Opened, words: str) -> None:
    page.page.locator("#requests-filter").fill(words)


def shown(page: Opened) -> int:
    return int(page.page.locator("#requests-count [data-name=shown]").get_attribute("data-value"))


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """A document with texts that try to break out, drawn anew each time."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    return document(220, seed)


@pytest.fixture
def opened(open_document: Callable[..., Opened], made: dict[str, Any]) -> Opened:
    return open_document(made)


def test_the_table_begins_in_the_order_of_the_file(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: a row is lost between two slices, or is there twice."""
    assert rows(opened) == list(range(220)) and shown(opened) == 220


@pytest.mark.parametrize("key", SORTS)
def test_sorting_by_each_column(opened: Opened, made: dict[str, Any], key: str) -> None:
    """Fault: numbers that are compared as texts, a sort that shuffles equal rows, a heading that says the wrong way."""
    requests = made["runs"][0]["requests"]
    button = opened.page.locator(f'#requests [data-sort="{key}"]')
    seen = set()
    for _ in range(2):
        button.click()
        way = opened.page.locator(f'#requests th:has([data-sort="{key}"])').get_attribute("aria-sort")
        assert rows(opened) == ordered(requests, list(range(220)), key, way == "descending"), way
        assert opened.page.locator("#requests th[aria-sort=ascending], #requests th[aria-sort=descending]").count() == 1
        seen.add(way)
    assert seen == {"ascending", "descending"}


def filters(requests: dict[str, Any]) -> list[str]:
    """Filters of each kind, with words and numbers of the document."""
    draw = random.Random(str(requests["prompt"]))
    some = lambda key: requests[key][draw.randrange(len(requests[key]))]  # noqa: E731
    words = draw.choice([answer for answer in requests["answer"] if len(answer.split()) > 3]).split()
    return [
        "reason:diverged", "reason:", "-reason:", "error:", "error:context_length", "-error:", f"turn:{some('turn')}",
        "turn:2..4", f"prompt:>{some('prompt')}", f"cached:<={some('cached')}", "id:support-", "finish:tool_calls",
        "from:disk", "out:0", f"calls:{draw.choice(('read_file', 'find_order'))}", "answer:REFUND", words[1].upper(),
        f'"{words[1]} {words[2]}"', "refund lisbon", "reason:cold turn:1 -from:memory", "nothing-says-this", "search",
        "line:>=3 line:<9", "prefill_ms:>150.5", "<script>alert(1)", "onerror=alert(1)", "http://x", "a:b:c", "[(*+?",
    ]  # fmt: skip


def test_the_filter_is_that_of_the_help(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: a term that is not heeded, that holds of other rows, or an expression of the reader's that breaks it."""
    requests = made["runs"][0]["requests"]
    some = 0
    for words in filters(requests):
        write_filter(opened, words)
        expected = chosen(requests, words)
        assert shown(opened) == len(expected), words
        assert rows(opened) == expected, words
        some += 0 < len(expected) < 220
    assert some > 10, "the filters chose all rows or none"


def test_what_is_typed_key_by_key_is_the_filter(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: the table follows one key behind, or a redrawing throws the reader out of the box."""
    opened.page.locator("#requests-filter").click()
    opened.page.keyboard.type("turn:3", delay=20)
    assert rows(opened) == chosen(made["runs"][0]["requests"], "turn:3")
    opened.page.wait_for_timeout(600)
    assert opened.page.evaluate("document.activeElement.id") == "requests-filter"
    assert "filter=turn:3" in opened.page.url
    opened.page.keyboard.press("Control+A")
    opened.page.keyboard.press("Delete")
    assert shown(opened) == 220


def test_the_filter_stays_where_a_row_is_opened_at_once(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: a row that is opened right after the last key empties the filter, and the reader loses the place."""
    write_filter(opened, "turn:2")
    # in one event: a row that is redrawn between the two halves of a click loses it
    opened.page.locator("#requests [data-row]").nth(1).evaluate("row => row.click()")
    expected = chosen(made["runs"][0]["requests"], "turn:2")
    assert shown(opened) == len(expected) and opened.page.locator("#requests-filter").input_value() == "turn:2"
    expect(opened.page.locator("#request-detail [data-request]")).to_be_visible()


def test_the_filter_and_the_order_hold_together(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: a new filter forgets the order, or a new order the filter."""
    requests = made["runs"][0]["requests"]
    opened.page.locator('#requests [data-sort="prompt"]').click()
    write_filter(opened, "turn:1..2")
    way = opened.page.locator('#requests th:has([data-sort="prompt"])').get_attribute("aria-sort")
    assert rows(opened) == ordered(requests, chosen(requests, "turn:1..2"), "prompt", way == "descending")


def test_a_row_says_what_the_document_says(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: a column that is shifted by one row, or tenths of milliseconds that pass for milliseconds."""
    requests = made["runs"][0]["requests"]
    heads = opened.page.evaluate(
        "[...document.querySelectorAll('#requests [data-sort]')].map((one) => one.dataset.sort)"
    )
    for row in opened.page.locator("#requests [data-row]").all()[:12]:
        at = int(row.get_attribute("data-row"))
        cells = row.locator("th, td").all()
        assert len(cells) == len(heads)
        for key, cell in zip(heads, cells, strict=True):
            said = cell.inner_text().strip()
            if key in NUMBERS:
                raw = number(requests, key, at)
                assert float(cell.get_attribute("data-value")) == raw
                known = not (key == "ideal" and raw < 0) and not (key == "turn" and raw == 0)
                assert agrees(said, (raw / 1000 if key.endswith("_ms") else raw) if known else None), (key, said, raw)
            elif key in ("reason", "finish", "from"):
                assert said == text(requests, key, at)


def detail(page: Opened) -> str | None:
    """The id of the opened request, or None."""
    shown = page.page.locator("#request-detail")
    return shown.locator("[data-request]").get_attribute("data-request") if shown.is_visible() else None


def test_an_opened_row_shows_the_request_whole(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: an answer of another request, a call without its arguments, a number that is not the row's."""
    requests = made["runs"][0]["requests"]
    draw = random.Random(random.randrange(1 << 30))
    plain = [
        n
        for n, name in enumerate(requests["id"])
        if requests["id"].count(name) == 1 and len(requests["answer"][n]) < 5000
    ]
    failed = [n for n in plain if requests["error"][n]]
    called = [n for n in plain if requests["calls"][n]]
    for at in [*draw.sample(plain, 4), *failed[:1], *called[:2]]:
        name = requests["id"][at]
        write_filter(opened, f"line:{requests['line'][at]} turn:{requests['turn'][at]}")
        opened.page.locator(f'#requests [data-row="{at}"] td').first.click()
        expect(opened.page.locator("#request-detail [data-request]")).to_have_attribute("data-request", name)
        for key in ("prompt", "cached", "computed", "out", "prefill_ms", "decode_ms"):
            assert opened.value(key, "#request-detail") == number(requests, key, at), key
        told = opened.page.locator("#request-detail").inner_text()
        if requests["error"][at]:
            assert text(requests, "error", at) in told
        if SOURCES[requests["from"][at]]:
            assert f"from {SOURCES[requests['from'][at]]}" in told
        prompt = requests["prompt_text"][at]
        for said in (requests["answer"][at], *([prompt] if isinstance(prompt, str) else sum(prompt, []))):
            assert comparable(said) in comparable(told), at
        for call, block in zip(requests["calls"][at] or [], opened.page.locator("[data-call]").all(), strict=True):
            assert block.get_attribute("data-call") == call["name"]
            assert json.loads(block.locator("pre").inner_text()) == json.loads(call["arguments"])


def comparable(words: str) -> str:
    """Text without what a page may show in another way: white space, and marks that are escaped when shown."""
    import re

    words = re.sub(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}", "", words)
    return "".join(letter for letter in words if letter.isprintable() and not letter.isspace())


def test_a_link_to_each_request_and_the_back_button(open_document: Callable[..., Opened], made: dict[str, Any]) -> None:
    """Fault: a link that opens another request, or none where the id has &, # or % in it; a step back that leaves the
    report."""
    requests = made["runs"][0]["requests"]
    odd = [n for n, name in enumerate(requests["id"]) if any(bad in name for bad in HOSTILE if bad)][:4]
    page = open_document(made)
    page.page.locator("#requests [data-row]").first.click()
    first = detail(page)
    page.page.locator('#requests [data-row="2"]').click()
    assert detail(page) == requests["id"][2]
    page.page.go_back()
    expect(page.page.locator("#request-detail [data-request]")).to_have_attribute("data-request", first)
    page.page.go_back()
    expect(page.page.locator("#request-detail")).to_be_hidden()
    page.page.go_forward()
    expect(page.page.locator("#request-detail [data-request]")).to_have_attribute("data-request", first)
    for at in [217, *odd]:
        write_filter(page, f"line:{requests['line'][at]} turn:{requests['turn'][at]}")
        page.page.locator(f'#requests [data-row="{at}"] td').first.click()
        linked = open_document(made, fragment="#" + page.page.url.partition("#")[2])
        assert detail(linked) == requests["id"][at]
        chosen_row = linked.page.locator("#requests [data-row][aria-current]")
        assert chosen_row.get_attribute("data-row") == str(at)
        linked.context.close()


def test_a_click_that_a_scroll_comes_into(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: rows are made anew between press and release, and the click meets none."""
    cell = opened.page.locator('#requests [data-row="3"] td').first
    cell.scroll_into_view_if_needed()
    box = cell.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.page.mouse.down()
    opened.page.evaluate("""() => {
        document.querySelector("#requests .rows").scrollTop += 3;
        return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    }""")
    opened.page.mouse.up()
    assert detail(opened) == made["runs"][0]["requests"]["id"][3]


def test_a_link_written_by_hand(open_document: Callable[..., Opened]) -> None:
    """Fault: `#request=ID`, which the documentation promises, opens nothing; the row lies out of sight."""
    made = document(200, 3, hostile=False)
    requests = made["runs"][0]["requests"]
    page = open_document(made, fragment=f"#request={requests['id'][150]}")
    assert detail(page) == requests["id"][150]
    expect(page.page.locator('#requests [data-row="150"]')).to_be_in_viewport()


@pytest.mark.parametrize(
    "fragment", ["#request=none-such", "#request=%", "#request=row:9999", "#request=__proto__", "#&=&"]
)
def test_a_link_to_no_request_opens_none(open_document: Callable[..., Opened], fragment: str) -> None:
    """Fault: an old link ends in an error, or opens the first request in silence."""
    page = open_document(document(30, 3, hostile=False), fragment=fragment)
    assert detail(page) is None and shown(page) == 30


def test_requests_of_one_id_are_told_apart(open_document: Callable[..., Opened]) -> None:
    """Fault: two lines of the input have one id, and only the first of them can be opened."""
    made = document(30, 3, hostile=False)
    requests = made["runs"][0]["requests"]
    requests["id"][7] = requests["id"][2] = "twin"
    for at in (2, 7):
        page = open_document(made)
        page.page.locator(f'#requests [data-row="{at}"] td').first.click()
        assert page.value("line", "#request-detail") == requests["line"][at]
        assert page.value("prompt", "#request-detail") == requests["prompt"][at]
        linked = open_document(made, fragment="#" + page.page.url.partition("#")[2])
        assert linked.value("prompt", "#request-detail") == requests["prompt"][at]


def test_a_reason_leads_to_its_requests(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: the table of misses says how many, and the reader has to look for them by hand."""
    miss = made["runs"][0]["tokens"]["misses"][0]
    opened.page.locator(f"#tokens [data-miss='{miss['reason']}'] a").click()
    assert shown(opened) == miss["requests"]
    expect(opened.page.locator("#requests h2")).to_be_in_viewport()
    opened.page.go_back()
    expect(opened.page.locator("#requests-count [data-name=shown]")).to_have_attribute("data-value", "220")


def test_the_keyboard_goes_from_row_to_row(opened: Opened, made: dict[str, Any]) -> None:
    """Fault: rows are for pointers alone, or the focus falls off where the drawn rows end."""
    opened.page.locator('#requests [data-row="0"] a').focus()
    for _ in range(60):
        opened.page.keyboard.press("ArrowDown")
    at = opened.page.evaluate("document.activeElement.closest('[data-row]')?.dataset.row")
    assert at == "60"
    opened.page.keyboard.press("Enter")
    assert detail(opened) == made["runs"][0]["requests"]["id"][60]
    opened.page.keyboard.press("Escape")
    assert detail(opened) is None
