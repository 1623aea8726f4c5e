"""The table of decode speeds of docs/speculation.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.speculation_table import RESULTS, figures, lines

PAGE = Path(__file__).resolve().parent.parent / "docs" / "speculation.md"


def figure(**own: Any) -> dict[str, Any]:
    base = {"model": "m", "dtype": "float32", "device": "cpu", "input": "tau_bench", "running": 1, "ratio": 1.96,
            "tokens_per_pass": 2.3, "own": False, "random": False}  # fmt: skip
    return base | own


def test_a_figure_has_its_own_cell(tmp_path: Path) -> None:
    """Fault: a figure of another data set, dtype or number of sequences replaces one, or stands in its column."""
    path = tmp_path / "speed.json"
    path.write_text(json.dumps([figure(), figure(running=8, ratio=1.5), figure(own=True, ratio=8.0)]))
    more = [figure(dtype="bfloat16", running=8), figure(random=True, input=None, ratio=0.98, tokens_per_pass=1.0)]
    assert lines([*figures([path]), *more]) == [
        "| model | dtype | device | drafts from | 1 running | 8 running |",
        "|---|---|---|---|--:|--:|",
        "| m | float32 | cpu | tau-bench | 1.96 (2.30) | 1.50 (2.30) |",
        "| m | float32 | cpu | tau-bench, its own `OUT` | 8.00 (2.30) |  |",
        "| m | bfloat16 | cpu | tau-bench |  | 1.96 (2.30) |",
        "| m | float32 | cpu | random tokens: nothing to find | 0.98 (1.00) |  |",
    ]


def test_the_page_has_the_measured_table() -> None:
    """Fault: a figure is edited on the page, or new results do not reach it (run tools/speculation_table.py)."""
    between = PAGE.read_text().partition("<!-- speed: begin -->\n")[2].partition("<!-- speed: end -->")
    assert between[1], "the marks are gone"
    expected = "\n".join(lines(figures([RESULTS]))) + "\n" if RESULTS.exists() else ""
    assert between[0] == expected, "put in what tools/speculation_table.py prints"
