"""The distribution's Chromium, for what looks at the report as a reader does: tests, pictures and measurements.

    python -m tools.chromium        prints where it is, or what to install

Playwright drives it; its own download of browsers is never used.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ENV_BROWSER = "APCBATCH_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome")
HOW_TO_INSTALL = (
    f"install Chromium (Debian and Ubuntu: apt-get install chromium), or set {ENV_BROWSER} to the path of a Chrome"
)


def find() -> str:
    """The path of the browser. Raises FileNotFoundError with a sentence if there is none."""
    named = os.environ.get(ENV_BROWSER)
    if named:
        if not os.access(named, os.X_OK):
            raise FileNotFoundError(f"{ENV_BROWSER} names {named}, which is not a program: {HOW_TO_INSTALL}")
        return named
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise FileNotFoundError(f"none of {', '.join(NAMES)} is on the PATH: {HOW_TO_INSTALL}")


def why_not() -> str | None:
    """Why nothing can be looked at here, in a sentence; None if it can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: `make test-browser` installs it"
    try:
        find()
    except FileNotFoundError as error:
        return str(error)
    return None


@contextmanager
def opened() -> Iterator[Browser]:
    """The browser, without a window, for as long as the block runs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find())
        try:
            yield browser
        finally:
            browser.close()


if __name__ == "__main__":
    try:
        print(find())
    except FileNotFoundError as error:
        sys.exit(f"apcbatch: {error}")
