"""One Chromium for all tests here, and reports for it to open: of made-up documents, and of real runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import chromium


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Chromium; it ends with the last test here, since its event loop would be in the way of other tests'."""
    with chromium.opened() as opened:
        yield opened


@pytest.fixture
def open_file(browser: Any) -> Iterator[Callable[..., Any]]:
    """open_file(path, fragment="", **context) -> Opened. At the end no page may have said or asked anything."""
    from tests.browser.opened import Opened

    pages: list[Opened] = []

    def open_file(path: Path, fragment: str = "", **context: Any) -> Opened:
        pages.append(Opened(browser, path, fragment, **context))
        return pages[-1]

    yield open_file
    for page in pages:
        page.close()


@pytest.fixture
def open_document(open_file: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """open_document(document, fragment="", title="report", **context) -> Opened, of the document's page."""
    from apcbatch.report.page import page

    def open_document(document: dict[str, Any], fragment: str = "", title: str = "report", **context: Any) -> Any:
        path = tmp_path / f"report-{len(list(tmp_path.iterdir()))}.html"
        path.write_bytes(page(document, title))
        return open_file(path, fragment, **context)

    return open_document
