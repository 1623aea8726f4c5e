"""Prints the tables of docs/cluster.md: what the simulator predicts, what the command serves, and what kills do.

    python -m benchmarks.cluster ../shared/data --workers 2,8,64,512 --kills 0 --add ten
    python -m benchmarks.cluster_driver ../shared/data --add
    python -m benchmarks.cluster_kills ../shared/data --add
    python tools/cluster_table.py

The figures are those of benchmarks/results/cluster.json, under the names `ten`, `driver` and `kills`, and for an H200
those of mamba-2.8b in benchmarks/results/cuda_models.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "cluster.json"
GPU_RESULTS = RESULTS.with_name("cuda_models.json")
GPU, PREFILL, DECODE, SIDE_BY_SIDE = "mamba-2.8b", "prefill 64 x 128", "decode 128", 128
NAMES = {"tau_bench": "tau-bench", "toolbench_dfs": "ToolBench", "short": "short prompts"}
ANSWERS, WORKERS = (16, 128, 500), 8  # tokens; of the rows of the command's table


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
    yield f"| | requests | {numbers[0]} workers | {' | '.join(map(str, numbers[1:]))} |"
    yield "|---|" + "--:|" * (1 + len(numbers))
    for name, group in groupby(found, key=lambda row: row["dataset"]):
        cells = {row["workers"]: row for row in group}
        requests = next(iter(cells.values()))["requests"]
        bounds = (f"{cells[number]['over bound']:.3f}" if number in cells else "" for number in numbers)
        sent = (f"{cells[number]['states sent']:,}" if number in cells else "" for number in numbers)
        yield f"| {NAMES[name]}, over bound | {requests:,} | {' | '.join(bounds)} |"
        yield f"| the same, states sent | | {' | '.join(sent)} |"


def gpu_ms(computed_tokens: float, answer_tokens: int) -> float:
    """Milliseconds of one H200 for a request, of full passes with SIDE_BY_SIDE requests."""
    [model] = (one for one in json.loads(GPU_RESULTS.read_text(encoding="utf-8"))["models"] if one["model"] == GPU)
    figures = {one["name"]: one.get("exact") for one in model["figures"]}
    return 1000 * computed_tokens / figures[PREFILL] + 1000 * answer_tokens * figures[DECODE] / SIDE_BY_SIDE


def driver_table() -> Iterator[str]:
    """The lines of the command's seconds for 1,000 requests, and of the number of GPUs that take as long."""
    gpus = " | ".join(f"H200s, {answer} tokens" for answer in ANSWERS)
    yield f"| | requests | main thread, s for 1,000 | of that scheduling | {gpus} |"
    yield "|---|" + "--:|" * (3 + len(ANSWERS))
    for row in document("driver")["rows"]:
        if row["workers"] == WORKERS:
            main = row["main thread s / 1,000"]
            served = " | ".join(f"{gpu_ms(row['computed tokens'], answer) / main:.1f}" for answer in ANSWERS)
            cells = f"{row['requests']:,} | {main:.2f} | {row['scheduling s / 1,000']:.2f} | {served}"
            yield f"| {NAMES[row['dataset']]} | {cells} |"


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
