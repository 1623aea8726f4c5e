"""Which sections are there, and what stands where one is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.opened import Opened, expect
from tests.report.documents import document

SECTIONS = ("verdict", "tokens", "tree", "timeline", "turns", "drafts", "curve", "requests", "comparison", "ran")


def visible(page: Opened) -> list[str]:
    """The sections that a reader sees, from top to bottom."""
    return page.page.evaluate(
        "[...document.querySelectorAll('main > section')].filter((s) => !s.hidden).map((s) => s.id)"
    )


def test_a_whole_document_has_every_section_in_order(open_document: Callable[..., Opened]) -> None:
    """Fault: a section stays hidden although it has data, or the verdict is not the first thing that is read."""
    page = open_document(document(50))
    assert visible(page) == list(SECTIONS)
    tops = [page.page.locator(f"#{name}").bounding_box()["y"] for name in SECTIONS]
    assert tops == sorted(tops)
    headings = [page.page.locator(f"#{name} h2").inner_text() for name in SECTIONS]
    assert all(headings) and len(set(headings)) == len(headings)


MISSING: dict[str, tuple[dict[str, Any], list[str], str | None]] = {
    "one run": ({"runs": 1}, ["comparison"], None),
    "no curve": ({"curve": False}, ["curve"], None),
    "no entries": ({"entries": False}, ["timeline"], None),
    "no prompts": ({"tree": False}, [], "--prompts INPUT"),
}


@pytest.mark.parametrize(("parts", "hidden", "said"), MISSING.values(), ids=MISSING)
def test_a_section_without_data(
    open_document: Callable[..., Opened], parts: dict[str, Any], hidden: list[str], said: str | None
) -> None:
    """Fault: an empty heading, or nothing where the reader could do something about it."""
    page = open_document(document(30, **parts))
    assert [name for name in SECTIONS if name not in visible(page)] == hidden
    if said:
        expect(page.page.locator("#tree")).to_contain_text(said)
        assert page.page.locator("#tree [role=tree]").count() == 0


@pytest.mark.parametrize("requests", [0, 1, 2])
def test_few_requests(open_document: Callable[..., Opened], requests: int) -> None:
    """Fault: a division by nothing, or an empty chart that ends in an error."""
    page = open_document(document(requests, runs=2))
    assert page.value("requests") == requests
    assert "NaN" not in page.page.inner_text("main") and "undefined" not in page.page.inner_text("main")


def test_a_run_that_did_not_end_says_so(open_document: Callable[..., Opened]) -> None:
    """Fault: a killed run looks like a good one, or the command that continues is not there."""
    made = document(40, unfinished=True)
    page = open_document(made)
    expect(page.page.locator("#verdict")).to_contain_text("did not end")
    command = made["runs"][0]["verdict"]["continue"]
    expect(page.page.locator("#verdict [data-name=continue]")).to_have_text(command)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 130, 143, None])
def test_each_exit_status_has_its_words(open_document: Callable[..., Opened], code: int | None) -> None:
    """Fault: the reader has to know statuses by heart, or an interrupted run reads as a finished one."""
    made = document(200, errors=code == 3)
    made["runs"][0]["verdict"]["exit_code"] = code
    said = open_document(made).page.locator("#verdict").inner_text()
    good = "Every request is answered" in said
    assert good == (code == 0)
    assert {None: "not known", 1: "stopped early", 3: "failed", 130: "interrupted", 143: "interrupted"}.get(
        code, ""
    ) in said


def test_many_cut_answers_are_no_green_tick(open_document: Callable[..., Opened]) -> None:
    """Fault: a run whose answers are all cut within their thought has a green tick, and nothing counts them."""
    made = document(40, errors=False, runs=2)
    verdict = made["runs"][0]["verdict"]
    verdict |= {"exit_code": 0, "doubts": ["cut", "empty"], "finish_reasons": {"length": 1234}, "empty_answers": 1233}
    verdict |= {"unread_calls": 2, "answer_warnings": {"cut_reasoning": 1232}}
    section = open_document(made).page.locator("#verdict")
    expect(section.locator(".ending.fair")).to_contain_text("but many answers are cut or are empty.")
    assert section.locator(".codes").all_inner_texts() == [
        "cut 1,234\nempty 1,233\nwith an unread call 2",
        "cut_reasoning 1,232",
    ]


def test_a_file_that_was_cut_says_so(open_file: Callable[..., Opened], tmp_path: Any, browser: Any) -> None:
    """Fault: half a download opens as an empty page without a word."""
    from apcbatch.report.page import page as make_page

    whole = make_page(document(40), "cut").decode()
    begin = whole.index('id="data">') + len('id="data">')
    end = whole.index("</script>", begin)
    path = tmp_path / "cut.html"
    path.write_text(whole[: (begin + end) // 2 // 4 * 4] + whole[end:])
    page = browser.new_page()
    page.goto(path.as_uri())
    expect(page.locator("[role=alert]")).to_be_visible()
    assert page.locator("[role=alert]").inner_text().strip().endswith(".")
    page.close()
