"""docs/caching.md says how much of some inputs repeats: what `apcbatch plan` measures today."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.reuse_table import head, row

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("path", [
    ROOT / "examples" / "agents.jsonl",
    pytest.param(SHARED / "toolbench_dfs.jsonl", marks=pytest.mark.data),
    pytest.param(SHARED / "taskmaster4.jsonl", marks=pytest.mark.data),
], ids=lambda path: path.stem)  # fmt: skip
def test_the_row_of_an_input_is_what_plan_says(path: Path) -> None:
    """Fault: the plan, the template or the tokenizer changes, or a figure is copied from somewhere else. (The largest
    input, tau_bench, takes a minute; its row is made by the same command.)"""
    table = (ROOT / "docs" / "caching.md").read_text().partition("## How much repeats")[2].partition("\n\n## ")[0]
    assert "\n".join([*head()]) in table
    assert f"\n{row(str(path))}\n" in table, "run tools/reuse_table.py"
