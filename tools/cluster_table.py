"""Prints the table of docs/cluster.md that says what the simulator predicts.

    python -m benchmarks.cluster ../shared/data --workers 2,8,64,512 --kills 0 --add ten
    python tools/cluster_table.py

Its figures are those of benchmarks/results/cluster.json, under the name `ten`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "cluster.json"
NAMES = {"tau_bench": "tau-bench", "toolbench_dfs": "ToolBench"}


def rows() -> list[dict[str, Any]]:
    """What was simulated, a row for each number of workers."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["ten"]["rows"]
    return found


def table() -> Iterator[str]:
    """The table's lines."""
    found = rows()
    numbers = sorted({row["workers"] for row in found})
    yield f"| | requests | grid | {numbers[0]} workers | {' | '.join(map(str, numbers[1:]))} |"
    yield "|---|" + "--:|" * (2 + len(numbers))
    for (name, block), group in groupby(found, key=lambda row: (row["dataset"], row["block"])):
        cells = {row["workers"]: row for row in group}
        requests = next(iter(cells.values()))["requests"]
        bounds = (f"{cells[number]['over bound']:.3f}" if number in cells else "" for number in numbers)
        sent = (f"{cells[number]['states sent']:,}" if number in cells else "" for number in numbers)
        yield f"| {NAMES[name]}, over bound | {requests:,} | {block} | {' | '.join(bounds)} |"
        yield f"| the same, states sent | | | {' | '.join(sent)} |"


if __name__ == "__main__":
    print("\n".join(table()))
