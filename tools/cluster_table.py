"""Prints the tables of docs/cluster.md: what the simulator predicts, what the command costs, and what kills do.

    python -m benchmarks.cluster ../shared/data --workers 2,8,64,512 --kills 0 --add ten
    python -m benchmarks.cluster_driver ../shared/data --add
    python -m benchmarks.cluster_kills ../shared/data --add
    python tools/cluster_table.py

The figures are those of benchmarks/results/cluster.json, under the names `ten`, `driver` and `kills`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "cluster.json"
NAMES = {"tau_bench": "tau-bench", "toolbench_dfs": "ToolBench"}


def document(name: str) -> dict[str, Any]:
    """A document of benchmarks/results/cluster.json."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))[name]
    return found


def rows() -> list[dict[str, Any]]:
    """What was simulated, a row for each number of workers."""
    found: list[dict[str, Any]] = document("ten")["rows"]
    return found


def table() -> Iterator[str]:
    """The lines of the prediction."""
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


def driver_table() -> Iterator[str]:
    """The lines of the command's own processor seconds for 1,000 requests."""
    yield "| | requests | workers | the command | of it scheduling |"
    yield "|---|--:|--:|--:|--:|"
    for row in document("driver")["rows"]:
        command, scheduling = row["command s / 1,000"], row["scheduling s / 1,000"]
        yield f"| {NAMES[row['dataset']]} | {row['requests']:,} | {row['workers']} | {command:.2f} | {scheduling:.2f} |"


def kills_table() -> Iterator[str]:
    """The lines of what kills do."""
    yield "| | runs | kills | requests | of them error records, to retry | lost or doubled |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, row in document("kills").items():
        yield (
            f"| {name} | {row['runs']} | {row['kills']} | {row['requests']:,} | {row['requests retried']} | "
            f"{row['lost or doubled']} |"
        )


TABLES = (table, driver_table, kills_table)

if __name__ == "__main__":
    print("\n\n".join("\n".join(lines()) for lines in TABLES))
