"""Prints the table of decode speeds of docs/speculation.md, which goes between its marks.

    python benchmarks/speculation.py speed shapes/mamba-130m --input tau_bench.jsonl --running 1 --out speed.json
    python tools/speculation_table.py [speed.json ...]

Without a file the figures are those of benchmarks/results/speculation.json, a list as the benchmark writes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "speculation.json"
NAMES = {"tau_bench": "tau-bench", "toolbench_dfs": "ToolBench"}
Figure = dict[str, Any]


def figures(paths: Iterable[Path]) -> list[Figure]:
    """The figures of some files, in order."""
    return [figure for path in paths for figure in json.loads(path.read_text(encoding="utf-8"))]


def lines(found: Sequence[Figure]) -> list[str]:
    """The lines of the table: a row for each model, dtype, device and data, a column for each number of sequences. A
    cell has the ratio, and in brackets the tokens a pass."""
    counts = sorted({one["running"] for one in found})
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for one in found:
        row = (one["model"], one["dtype"], one["device"], _data(one))
        cells.setdefault(row, {})[one["running"]] = f"{one['ratio']:.2f} ({one['tokens_per_pass']:.2f})"
    return [
        "| model | dtype | device | drafts from | " + " | ".join(f"{count} running" for count in counts) + " |",
        "|---|---|---|---|" + "--:|" * len(counts),
        *(
            "| " + " | ".join([*row, *(values.get(count, "") for count in counts)]) + " |"
            for row, values in cells.items()
        ),
    ]


def _data(one: Figure) -> str:
    """What the drafts of a figure come from."""
    if one["random"]:
        return "random tokens: nothing to find"
    name = NAMES.get(one["input"], str(one["input"]))
    return f"{name}, its own `OUT`" if one["own"] else name


if __name__ == "__main__":
    print("\n".join(lines(figures(map(Path, sys.argv[1:])) if sys.argv[1:] else figures([RESULTS]))))
