"""docs/reference/api.md says what the docstrings say."""

from __future__ import annotations

import inspect

import apcbatch
from tools.make_api_docs import TARGET, code, document, parameters


def test_the_page_is_what_the_docstrings_say() -> None:
    """Fault: an argument or a method changes and docs/reference/api.md does not (run tools/make_api_docs.py)."""
    assert TARGET.read_text(encoding="utf-8") == document()


def test_every_public_name_is_on_the_page() -> None:
    """Fault: a class is exported without a page that says what it takes."""
    page = document()
    for name in apcbatch.__all__:
        if inspect.isclass(getattr(apcbatch, name)):
            assert f"\n## {name}\n" in page
    for name in vars(apcbatch.Engine):
        if not name.startswith("_"):
            assert f"\n### Engine.{name}\n" in page


def test_a_long_signature_has_a_line_for_each_argument() -> None:
    """Fault: a keyword-only mark is lost, or a default is shown as an address in memory."""
    lines = code("Engine", parameters(apcbatch.Engine), "").splitlines()
    assert lines[:3] == ["```python", "Engine(", "    model: str | Path,"] and "    *," in lines
    assert "    warn: Callable[[str], None] = ...," in lines and not any("0x" in line for line in lines)
