"""Read the block-size curve from a document of `tune-block-size --json` or `plan --json`.

Any other file is a UsageError.
"""

from __future__ import annotations

from typing import Any

import orjson

from apcbatch.data.input.files import reason
from apcbatch.errors import UsageError
from apcbatch.regular_files import read_regular_file

MAX_BYTES = 16 << 20
MOST_CANDIDATES = 4096
COUNTS = ("block_size", "cached_tokens", "computed_tokens", "store_bytes")
TEXTS = ("policy", "model")


def read_curve(path: str) -> dict[str, Any]:
    """Return the block-size curve as an object of the report; its `source` is the command that wrote the file."""
    try:
        data = orjson.loads(read_regular_file(path, MAX_BYTES))
    except (OSError, orjson.JSONDecodeError) as error:
        raise UsageError(f"--tune {path} cannot be read: {reason(error)}; {EXPECTED}") from None
    candidates = data.get("candidates") if isinstance(data, dict) else None
    if not isinstance(candidates, list) or not 0 < len(candidates) <= MOST_CANDIDATES:
        raise UsageError(f"--tune {path} has no candidates; {EXPECTED}")
    rows = [_candidate(path, number, one) for number, one in enumerate(candidates, start=1)]
    recommended = data.get("recommended")
    chosen = recommended.get("block_size") if isinstance(recommended, dict) else None
    return {
        "source": "plan" if recommended is None else "tune-block-size",
        **{name: data[name] if isinstance(data.get(name), str) else "" for name in TEXTS},
        "recommended": next((row for row in rows if row["block_size"] == chosen), None),
        "candidates": sorted(rows, key=lambda row: row["block_size"]),
    }


EXPECTED = "expected the file of `apcbatch tune-block-size --json FILE` or `apcbatch plan --json FILE`"


def _candidate(path: str, number: int, given: Any) -> dict[str, Any]:
    row = given if isinstance(given, dict) else {}
    counts = {name: row.get(name) for name in COUNTS}
    measures = {
        "hit_rate": row.get("hit_rate"),
        "predicted_s": row.get("predicted_prefill_s"),
        "measured_s": row.get("measured_prefill_s"),
    }
    good = all(type(value) is int and 0 <= value < 1 << 60 for value in counts.values())
    good &= all(value is None or (type(value) in (int, float) and value >= 0) for value in measures.values())
    if not good or measures["hit_rate"] is None:
        raise UsageError(f"--tune {path}: candidate {number} lacks one of its numbers; {EXPECTED}")
    return counts | measures
