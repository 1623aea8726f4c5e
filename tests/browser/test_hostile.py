"""Texts that try to break out of the page are shown, and not run.

The watch fails a test whose page says or asks anything; here each text is also looked for where it must be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.opened import Opened, expect
from tests.browser.test_requests import comparable
from tests.report.documents import document
from tests.report.runs import HOSTILE

RUN = "document.documentElement.dataset.broken = 1"
TEXTS = (
    *(text for text in HOSTILE if text),
    f"</script><script>{RUN}</script>",
    f"<img src=x onerror='{RUN}'>",
    f"<svg onload='{RUN}'>",
    f'<iframe srcdoc="<script>parent.{RUN}</script>">',
    f"javascript:{RUN}",
    f'" autofocus onfocus="{RUN}',
    "<style>body{display:none}</style>",
    "<base href=https://example.org/><a href=x>",
    "<meta http-equiv=refresh content=0;url=https://example.org>",
    "]]></data><plaintext>",
    "{{script}}{{data}}",
    "\ud800 a half of a pair",
    "%3Cscript%3E",
    "\x00\x01\x02\x7f\x9f",
)


def hostile(text: str) -> dict[str, Any]:
    """A document that has the text in every place where one of the user's, or one of a foreign machine's, may stand."""
    made = document(12, 1, hostile=False, unfinished=True)
    for run in made["runs"]:
        requests = run["requests"]
        requests["id"][0] = requests["answer"][0] = text
        requests["prompt_text"][0] = [[text, text]]
        requests["error"][0] = 0
        requests["calls"][0] = [{"name": text, "arguments": text}]
        requests["id"][1], requests["error"][1], requests["errors"][1] = "failed", 1, f"invalid_request: {text}"
        requests["reasons"][1] = text
        run["name"], run["verdict"]["warnings"], run["verdict"]["continue"] = text, [text], f"apcbatch {text}"
        run["notes"] = [text]
        run["tree"]["text"][1] = text
        for miss in run["tokens"]["misses"]:
            miss["reason"], miss["remedy"] = (text, text)
        for process in run["ran"]["processes"]:
            process["command"] += text
            process["input"] = process["model"] = text
            process["machine"]["cpu"] = text
            process["options"].append(["chat_template", text, text])
        for timeline in run["timelines"]:
            timeline["worker"] = text
    comparison = made["comparisons"][0]
    comparison["changed_options"] = [{"name": text, "base": text, "other": None}]
    comparison["different"] = [{"id": text, "base_row": 0, "other_row": 0, "at": 3}]
    comparison["different_count"] = 1
    return made


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_hostile_text_is_shown_and_not_run(open_document: Callable[..., Opened], text: str) -> None:
    """Fault: a conversation with markup in it runs in the browser of whoever reads the report."""
    page = open_document(hostile(text), title=text.encode(errors="replace").decode())
    page.page.locator("#requests [data-row='0'] td").first.click()
    elements = page.page.evaluate("[...new Set([...document.querySelectorAll('*')].map((one) => one.localName))]")
    assert not {"iframe", "img", "object", "embed", "form", "base", "plaintext", "link"} & set(elements)
    assert page.page.locator("script").count() == 2 and page.page.locator("style").count() == 1
    assert page.page.evaluate("document.documentElement.dataset.broken") is None
    assert page.page.evaluate("""[...document.querySelectorAll("a[href]")].every((one) => one.protocol === "file:")""")
    handlers = "[...document.querySelectorAll('*')].flatMap((one) => [...one.attributes]).map((one) => one.name)"
    assert not [name for name in page.page.evaluate(handlers) if name.startswith("on")]
    for place in ("#verdict", "#tokens", "#edge", "#requests [data-row='0']", "#request-detail", "#comparison", "#ran"):
        if place == "#edge":
            page.page.locator("#tree [data-node='1']").hover()
        said = page.page.locator(place).first.text_content()
        assert comparable(text)[:80] in comparable(said), place
    page.page.locator("#requests [data-row='1'] td").first.click()
    assert comparable(text) in comparable(page.page.locator("#request-detail").text_content())
    page.page.locator("#requests-filter").fill(text.replace('"', " "))
    expect(page.page.locator("#verdict")).to_be_visible()


def test_marks_that_reorder_stay_in_their_text(open_document: Callable[..., Opened]) -> None:
    """Fault: an id that is written from right to left turns round the numbers beside it."""
    made = document(12, 1, hostile=False)
    made["runs"][0]["requests"]["id"][0] = "\u202e321-eno\u202c"
    row = open_document(made).page.locator("#requests [data-row='0']")
    assert "\u202e" not in row.inner_text() and "321-eno" in row.inner_text()


def test_the_file_says_nothing_of_the_users_in_clear(open_document: Callable[..., Opened]) -> None:
    """Fault: a text gets into the file beside the packed data, where a parser may take it for markup."""
    made = hostile("</script>UNMISTAKABLE")
    page = open_document(made)
    assert b"UNMISTAKABLE" not in page.path.read_bytes()
