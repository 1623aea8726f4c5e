"""The page's own scripts and style, for which there is no linter without node: nothing in them is dead.

The browser compiles the scripts in strict mode, and counts the calls of each function while a reader uses the whole
page; a class that the style knows must be one that the page has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import apcbatch.report
from tests.browser.opened import Opened
from tests.report.documents import document

ASSETS = Path(apcbatch.report.__file__).parent / "assets"
CLASS = re.compile(r"\.([a-zA-Z][\w-]*)(?=[^{}]*\{)")
# For what a whole document does not have: other browsers, and a file that was cut.
NOT_CALLED: set[str] = set()


def use(page: Opened) -> None:
    """All that a reader can do."""
    keys = page.page.keyboard
    page.page.locator("#verdict .command button").click()
    page.page.locator("#tokens [data-miss] a").first.click()
    tree = page.page.locator("#tree [data-node]")
    tree.nth(1).hover()
    tree.first.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowLeft", "Enter", "Backspace", "ArrowUp", "Home", "Escape"):
        keys.press(key)
    page.page.locator("#tree input[type=radio]").nth(1).check()
    for place in page.page.locator("[role=slider]").all():
        place.hover()
        place.focus()
        keys.press("ArrowRight")
    for words in ('-reason:cold turn:1..9 prompt:>1 "the"', "http://x", ""):
        page.page.locator("#requests-filter").fill(words)
    for name in ("prompt", "id"):
        page.page.locator(f'#requests [data-sort="{name}"]').click()
    page.page.locator("#requests [data-row] td").first.click()
    page.page.locator("#requests [data-row] a").first.focus()
    keys.press("ArrowDown")
    page.page.locator("#comparison .differences a").first.click()
    page.page.locator("#run").select_option("1")
    page.page.go_back()
    page.page.pdf()


def test_every_function_is_called(open_document: Callable[..., Opened]) -> None:
    """Fault: a function that nothing calls any more is carried in every report, and read by everyone who looks for what
    is."""
    page = open_document(document(300, 1, runs=3, unfinished=True))
    session = page.context.new_cdp_session(page.page)
    session.send("Profiler.enable")
    session.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": False})
    page.page.reload()
    page.wait()
    use(page)
    called: dict[str, int] = {}
    for script in session.send("Profiler.takePreciseCoverage")["result"]:
        if script["url"].startswith("file:"):
            for one in script["functions"]:
                name = one["functionName"]
                called[name] = called.get(name, 0) + one["ranges"][0]["count"]
    written = set(
        re.findall(r"^(?:async )?function (\w+)", "".join(map(read, sorted(ASSETS.glob("*.js")))), re.MULTILINE)
    )
    assert len(written) > 50
    assert {name for name in written if not called.get(name)} == NOT_CALLED


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_scripts_are_strict_and_leave_no_names_behind(open_document: Callable[..., Opened]) -> None:
    """Fault: a name that is misspelt becomes a variable of the window, and nothing says so."""
    page = open_document(document(5))
    names = page.page.evaluate("""() => {
        const fresh = document.createElement("iframe");
        document.body.append(fresh);
        const usual = new Set(Object.getOwnPropertyNames(fresh.contentWindow));
        fresh.remove();
        return Object.getOwnPropertyNames(window).filter((name) => !usual.has(name) && !/^[0-9]+$/.test(name));
    }""")
    assert [name for name in names if not name.startswith("__")] == []


def test_every_class_of_the_style_is_on_the_page() -> None:
    """Fault: rules for what is not there any more."""
    style = re.sub(r"/\*.*?\*/", "", read(ASSETS / "style.css"), flags=re.DOTALL)
    others = "".join(read(path) for path in sorted(ASSETS.iterdir()) if path.suffix != ".css")
    words = set(re.findall(r"[\w-]+", others))
    classes = set(CLASS.findall(style))
    assert len(classes) > 20
    assert classes - words == set()
