"""The watch itself: a page that does what a report must not is caught. Otherwise the other tests here see nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.opened import Opened

READY = "<html data-ready=true>"
POLICY = "default-src 'none'; script-src 'nonce-a'"
HEAD = f'<!doctype html>{READY}<meta http-equiv="Content-Security-Policy" content="{POLICY}">'

MISDEEDS = {
    "a word on the console": ("console.log('x')", "console: x"),
    "an error": ("throw new Error('broken')", "pageerror: broken"),
    "a rejection": ("Promise.reject('lost')", "lost"),
    "a request": ("fetch('https://example.org/x').catch(() => 0)", "policy: connect-src https://example.org/x"),
    "a picture": ("new Image().src = 'http://example.org/y.png'", "policy: img-src http://example.org/y.png"),
    "a file beside it": ("new Image().src = 'beside.png'", "beside.png"),
    "a handler in the markup": (
        "document.documentElement.insertAdjacentHTML('beforeend', '<img src onerror=alert(1)>')",
        "policy: script-src-attr",
    ),
    "a dialog": ("setTimeout(() => alert(1))", "dialog"),
}


@pytest.mark.parametrize(("script", "said"), MISDEEDS.values(), ids=MISDEEDS)
def test_what_a_report_must_not_do_is_noted(script: str, said: str, browser: Any, tmp_path: Path) -> None:
    """Fault: the watch is deaf to one kind of misdeed, and every test here passes on a page that does it."""
    path = tmp_path / "bad.html"
    path.write_text(f"{HEAD}<script nonce=a>{script}</script>")
    page = Opened(browser, path)
    for _ in range(100):  # until all of it has come, on a busy machine too
        if any(said in one for one in page.noted):
            break
        page.page.wait_for_timeout(50)
    with pytest.raises(AssertionError) as caught:
        page.close()
    assert said in str(caught.value)


def test_a_request_that_no_policy_forbids_is_noted(browser: Any, tmp_path: Path) -> None:
    """Fault: the page's policy goes, and what it held back reaches the network unseen."""
    path = tmp_path / "open.html"
    path.write_text(f'{READY}<link rel=stylesheet href="https://example.org/z.css">')
    page = Opened(browser, path)
    with pytest.raises(AssertionError, match=r"a request to https://example.org/z.css"):
        page.close()


def test_a_quiet_page_is_let_pass(browser: Any, tmp_path: Path) -> None:
    """Fault: the watch sees misdeeds everywhere, and its word means nothing."""
    path = tmp_path / "good.html"
    path.write_text(f"{HEAD}<script nonce=a>document.title = 'quiet'</script>")
    Opened(browser, path).close()
