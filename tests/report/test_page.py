"""The page as a file: what is in it, what is not, and that the document comes out as it went in. No browser is needed;
how the page looks and acts is tested in tests/browser/."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import random
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from apcbatch.report.page import SCRIPTS, page
from tests.report.documents import document
from tests.report.runs import HOSTILE

ASSETS = files("apcbatch.report") / "assets"
SECTIONS = ["verdict", "tokens", "tree", "timeline", "turns", "drafts", "curve", "requests", "comparison", "ran"]
MOST_OWN_BYTES = 100_000


class Parsed(HTMLParser):
    """The elements of a page: (tag, attributes) in order, and the text inside each kind."""

    def __init__(self, made: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(made.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.tags if attributes.get("id")]


@pytest.fixture(scope="module")
def made() -> bytes:
    return page(document(requests=120, seed=random.randrange(10**9), runs=3), "a report")


def test_the_document_comes_out_as_it_went_in() -> None:
    """Fault: a number or a text changes on its way into the page (a lone surrogate ends in a traceback)."""
    given = document(requests=60, seed=random.randrange(10**9))
    given["runs"][0]["requests"]["answer"][0] = "a lone surrogate \ud800, \x00, \u2028 and </script>"
    data = rb'<script type="application/octet-stream" id="data">([^<]*)</script>'
    [found] = re.findall(data, page(given, "title"))
    assert json.loads(gzip.decompress(base64.b64decode(found, validate=True))) == given


def test_the_file_is_whole_and_has_every_part(made: bytes) -> None:
    """Fault: a tag is not closed, a section of the report is missing or in another place, an id is there twice."""
    parsed = Parsed(made)
    assert parsed.open == []
    assert [attributes["id"] for tag, attributes in parsed.tags if tag == "section"] == SECTIONS
    ids = parsed.ids()
    assert len(ids) == len(set(ids))
    assert {"run", "data"} <= set(ids)
    script = parsed.texts["script"][1]
    for name in ("edge", "tree-reset", "requests-filter", "requests-count", "request-detail"):
        assert f'id: "{name}"' in script
    assert made.startswith(b"<!doctype html>\n<!-- apcbatch report")


def test_no_text_of_the_user_is_in_clear() -> None:
    """Fault: a text of a conversation, an id, an option or a file's name stands in the page where a browser could take
    it for markup."""
    word = f"xyzzy{random.randrange(10**9)}"
    given = document(requests=30, seed=1)
    run = given["runs"][0]
    run["name"] = run["requests"]["id"][3] = run["requests"]["answer"][4] = f"</script><b>{word}</b>"
    run["tree"]["text"][1] = run["ran"]["processes"][0]["options"][0][1] = word
    made = page(given, "title")
    assert word.encode() not in made
    assert not [text for text in HOSTILE if len(text) > 12 and text.encode() in made]


def test_the_title_is_escaped() -> None:
    """Fault: a file's name ends the title and begins a script, or is taken for a place of the template."""
    name = "</title><script>alert(1)</script>{{data}} {{script}} & \ud800"
    made = page(document(requests=5), name)
    parsed = Parsed(made)
    assert parsed.texts["title"] == [name.replace("\ud800", "?")]
    assert [tag for tag, _ in parsed.tags].count("script") == 2


def test_the_policy_names_the_script_and_the_style(made: bytes) -> None:
    """Fault: the script is changed and its hash is not, so that the page stays empty; or the policy lets more in than
    the page needs."""
    parsed = Parsed(made)
    (policy,) = [
        attributes["content"]
        for tag, attributes in parsed.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))

    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    assert rules == {
        "default-src": "'none'",
        "style-src": digest(parsed.texts["style"][0]),
        "script-src": digest(parsed.texts["script"][1]),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert [tag for tag, _ in parsed.tags][:3] == ["html", "head", "meta"], "what stands before the policy is not ruled"
    assert made.index(b"Content-Security-Policy") < min(made.index(b"<style>"), made.index(b"<script"))


def test_no_part_leads_anywhere() -> None:
    """Fault: the page loads or sends something, or makes markup out of text."""
    for name in [*SCRIPTS, "page.html", "style.css"]:
        text = (ASSETS / name).read_text("utf-8")
        for banned in (
            "http:", "https:", "://", "url(", "@import", "import(", "import ", "fetch(", "XMLHttpRequest", "WebSocket",
            "EventSource", "sendBeacon", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser",
            "eval(", "new Function", "localStorage", "sessionStorage", "cookie", " onclick", "src=",
        ):  # fmt: skip
            assert banned not in text, f"{name} has {banned}"


def test_each_part_says_what_it_is_and_is_used() -> None:
    """Fault: a script is in the folder and not in the page, or has no head comment."""
    assert sorted(SCRIPTS) == sorted(entry.name for entry in ASSETS.iterdir() if entry.name.endswith(".js"))
    for name in SCRIPTS:
        lines = (ASSETS / name).read_text("utf-8").splitlines()
        assert lines[0].startswith("// "), name
        assert max(map(len, lines)) <= 120, name


def test_no_name_is_given_twice() -> None:
    """Fault: two files of the page, which share one scope, have a function of one name, and the later one wins."""
    defined = [
        name
        for script in SCRIPTS
        for name in re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", (ASSETS / script).read_text(), re.M)
    ]
    assert sorted(defined) == sorted(set(defined))


def test_the_parts_are_small(made: bytes) -> None:
    """Fault: what every report carries beside its data grows without anybody looking."""
    (data,) = re.findall(rb'id="data">([^<]*)<', made)
    assert len(made) - len(data) < MOST_OWN_BYTES


def test_the_page_has_all_of_the_scripts_but_their_comments(made: bytes) -> None:
    """Fault: what leaves comments out also leaves code out, as a text with two slashes or a line of a longer text."""
    script = Parsed(made).texts["script"][1]
    for name in SCRIPTS:
        whole = (ASSETS / name).read_text("utf-8")
        code = [line.strip() for line in re.sub(r"/\*\*.*?\*/", "", whole, flags=re.S).splitlines()]
        kept = "\n".join(line for line in code if line and not line.startswith("//"))
        assert kept in script, name
        assert all(line.count("`") % 2 == 0 for line in code), f"{name} has a text of several lines"


def test_the_same_document_gives_the_same_bytes() -> None:
    """Fault: a time or a folder's order is in the page, and two reports of one run differ."""
    given = document(requests=20, seed=7)
    assert page(given, "title") == page(given, "title")


def test_a_number_that_is_not_finite_is_refused() -> None:
    """Fault: NaN goes into the JSON, and the browser cannot read any of it."""
    given = document(requests=5)
    given["runs"][0]["verdict"]["hit_rate"] = float("nan")
    with pytest.raises(ValueError):
        page(given, "title")
