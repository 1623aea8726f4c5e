"""Random, valid report documents: their parts agree with each other, and their texts are hostile.

`document` is small enough to read, `large_document` has 50,000 requests. The same seed gives the same document.
"""

from __future__ import annotations

import random
from typing import Any

from tests.report.runs import Run


def document(
    requests: int = 200,
    seed: int = 0,
    runs: int = 2,
    *,
    entries: bool = True,
    tree: bool = True,
    curve: bool = True,
    prompts: bool = True,
    errors: bool = True,
    hostile: bool = True,
    unfinished: bool = False,
    processes: int = 2,
) -> dict[str, Any]:
    """A document with some runs of the same requests, each with the given parts."""
    draw = random.Random(f"{requests} {seed}")
    options = {
        "entries": entries, "tree": tree, "prompts": prompts, "errors": errors, "hostile": hostile,
        "processes": processes,
    }  # fmt: skip
    made = [Run(seed, requests, n, unfinished and n == 0, **options) for n in range(runs)]
    return {
        "format": 1,
        "made": {"version": "0.9.0", "at": 1795219200.5},
        "runs": [run.as_document() for run in made],
        "comparisons": [_comparison(made[0], other, n) for n, other in enumerate(made[1:], start=1)],
        "curve": _curve(draw) if curve else None,
    }


def large_document(requests: int = 50_000, seed: int = 0, runs: int = 1) -> dict[str, Any]:
    """A document of many requests, with texts as short as they are in such a report."""
    return document(requests, seed, runs, prompts=False)


def _comparison(base: Run, other: Run, number: int) -> dict[str, Any]:
    """Of the first two runs every answer is the same; later ones differ in some."""
    rows = {name: n for n, name in enumerate(base.rows["id"])}
    shared = [(name, rows[name], n) for n, name in enumerate(other.rows["id"]) if name in rows]
    different = [
        {"id": name, "base_row": one, "other_row": two, "choice": 0, "at": -1 if one % 3 == 0 else one % 128}
        for name, one, two in (shared[:: max(1, len(shared) // 7)] if number != 1 else [])
    ]
    sums = base.summary(), other.summary()
    measures = [
        ("prompt tokens", "tokens", "prompt_tokens"), ("prompt tokens restored", "tokens", "cached_tokens"),
        ("prompt tokens computed", "tokens", "computed_tokens"), ("errors", "requests", "errors"),
        ("peak memory", "bytes", "peak_rss_bytes"),
    ]  # fmt: skip
    reasons = {*sums[0]["miss_reasons"], *sums[1]["miss_reasons"]}
    return {
        "base": 0,
        "other": number,
        "both": len(shared),
        "only_base": len(base.rows["id"]) - len(shared),
        "only_other": len(other.rows["id"]) - len(shared),
        "other_requests": 0,
        "same_answers": len(shared) - len(different),
        "different": different[:1000],
        "different_count": len(different),
        "failed_count": sum(one["at"] < 0 for one in different),
        "other_model": number > 2,
        "rows": [
            {"name": name, "unit": unit, "base": sums[0][key], "other": sums[1][key]} for name, unit, key in measures
        ],
        "misses": [
            {"reason": r, "base": sums[0]["miss_reasons"].get(r, 0), "other": sums[1]["miss_reasons"].get(r, 0)}
            for r in sorted(reasons)
        ],
        "changed_options": [{"name": "block_size", "base": 64, "other": 64 << number}],
    }


def _curve(draw: random.Random) -> dict[str, Any]:
    rows = []
    for power in range(12):
        cached = 1_400_000 - 9_000 * power * power
        seconds = round(45 + power * power * draw.uniform(0.8, 1.2), 3)
        rows.append(
            {
                "block_size": 1 << power, "hit_rate": cached / 1_494_719, "cached_tokens": cached,
                "computed_tokens": 1_494_719 - cached, "store_bytes": (12 - power) * 40_000_000,
                "predicted_s": seconds, "measured_s": round(seconds * 1.1, 3) if power in (4, 5) else None,
            }
        )  # fmt: skip
    return {
        "source": "tune-block-size",
        "policy": "planned",
        "model": "demo",
        "recommended": rows[4],
        "candidates": rows,
    }
