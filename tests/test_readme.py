"""README.md shows what a run prints today."""

from __future__ import annotations

import pytest

from tools.make_readme import RUN, SECONDS, TARGET, document, without_seconds


@pytest.mark.effort(3)
@pytest.mark.slow
def test_the_figures_are_those_of_a_run() -> None:
    """Fault: a column, a key, or a number of the example changes, and the first page shows the old one (run
    python -m tools.make_readme)."""
    page = TARGET.read_text(encoding="utf-8")
    assert RUN.search(page) and SECONDS.search(page), "there is nothing to compare"
    assert without_seconds(document(page)) == without_seconds(page)
