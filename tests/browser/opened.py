"""A page as a reader has it open, watched: its console messages, its requests to a network and its unasked actions.

Importing this skips the module that does so where there is no browser.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import chromium

if reason := chromium.why_not():
    pytest.skip(reason, allow_module_level=True)

from playwright.sync_api import Browser, BrowserContext, Dialog, Locator, Page, Route, expect

__all__ = ["Locator", "Opened", "Page", "expect"]

TIMEOUT_MS = 20_000  # of every wait, also of `expect`, whose own is 5 s
expect.set_options(timeout=TIMEOUT_MS)

# A violation of the page's policy, and a promise that is not awaited, are said where the listener hears them.
LISTEN = """
document.addEventListener("securitypolicyviolation",
    (event) => console.error("policy: " + event.violatedDirective + " " + event.blockedURI));
window.addEventListener("unhandledrejection", (event) => console.error("rejection: " + event.reason));
"""


class Opened:
    """One page in a context of its own; `noted` holds what a report must never do, sentence by sentence."""

    def __init__(self, browser: Browser, path: Path, fragment: str = "", **context: Any) -> None:
        """Opens the file and waits until it is drawn; `context` is Playwright's (viewport, color_scheme, ...)."""
        self.noted: list[str] = []
        self.path = path
        self.context: BrowserContext = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **context})
        self.context.set_default_timeout(TIMEOUT_MS)
        self.context.route("**/*", self._let_files_through)
        self.context.add_init_script(LISTEN)
        self.context.on("page", self._watch)
        self.page = self.context.new_page()
        self.page.goto(path.as_uri() + fragment)
        self.wait()

    def wait(self) -> None:
        """Until the document was decoded and drawn."""
        self.page.locator("html[data-ready]").wait_for()

    def value(self, name: str, within: str = "#verdict") -> Any:
        """The raw number that stands behind a shown one, or None for none."""
        text = self.page.locator(f'{within} [data-name="{name}"]').first.get_attribute("data-value")
        return None if text in (None, "") else float(text)

    def close(self) -> None:
        """Ends the context. Raises AssertionError if the page did what a report must not."""
        self.context.close()
        assert not self.noted, f"{self.path.name}: " + "; ".join(self.noted)

    def _note(self, what: str) -> Callable[[Any], None]:
        return lambda event: self.noted.append(
            f"{what}: {getattr(event, 'text', None) or getattr(event, 'url', event)}"
        )

    def _watch(self, page: Page) -> None:
        if len(self.context.pages) > 1:
            self.noted.append(f"another page was opened: {page.url}")
        for event in ("console", "pageerror", "crash", "download", "worker", "websocket", "filechooser"):
            page.on(event, self._note(event))  # type: ignore[call-overload]
        page.on("dialog", self._dismiss)  # the page waits for it

    def _dismiss(self, dialog: Dialog) -> None:
        self.noted.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _let_files_through(self, route: Route) -> None:
        if route.request.url == self.path.as_uri() and route.request.is_navigation_request():
            route.continue_()
        else:
            self.noted.append(f"a request to {route.request.url}")
            route.abort()
