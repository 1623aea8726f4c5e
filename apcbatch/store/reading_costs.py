"""Read and write the file of a store with the measured costs of reading a snapshot; see --min-gain-tokens.

Invariants: each model, dtype and device is measured once, so that all runs of a store plan alike; a file that cannot be
read counts as empty.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Any

import orjson

from apcbatch.regular_files import read_regular_file
from apcbatch.sampling import MOST_TOKENS

COSTS_NAME = "reading-costs.json"
MAX_BYTES = 1 << 20
MOST_COSTS = 256  # the oldest ones are dropped


@dataclass(frozen=True, slots=True)
class ReadingCost:
    """Measured cost of reading a snapshot. model: digest of the model's files (data/model_files.py). device: name of
    the device; for a CPU, also the number of threads. tokens: tokens that prefill computes in the time of one read."""

    model: str
    dtype: str
    device: str
    tokens: int


def read_costs(folder: str | os.PathLike[str]) -> list[ReadingCost]:
    """Return the costs in a store's folder, the oldest first."""
    try:
        rows = orjson.loads(read_regular_file(os.path.join(folder, COSTS_NAME), MAX_BYTES))
    except (OSError, ValueError):
        return []
    return [ReadingCost(**row) for row in rows if _is_cost(row)] if isinstance(rows, list) else []


def find_cost(folder: str | os.PathLike[str], model: str, dtype: str, device: str | None = None) -> ReadingCost | None:
    """Return the latest cost of a model and dtype in a store's folder. device: None for any device."""
    wanted = (model, dtype) if device is None else (model, dtype, device)
    found = (
        cost for cost in reversed(read_costs(folder)) if (cost.model, cost.dtype, cost.device)[: len(wanted)] == wanted
    )
    return next(found, None)


def with_cost(folder: str | os.PathLike[str], cost: ReadingCost) -> bytes:
    """Return the content of the file with a cost added."""
    return orjson.dumps([asdict(one) for one in [*read_costs(folder), cost][-MOST_COSTS:]], option=orjson.OPT_INDENT_2)


def _is_cost(row: Any) -> bool:
    if not isinstance(row, dict) or row.keys() != {field.name for field in fields(ReadingCost)}:
        return False
    texts, tokens = (row["model"], row["dtype"], row["device"]), row["tokens"]
    return all(isinstance(text, str) for text in texts) and type(tokens) is int and 1 <= tokens <= MOST_TOKENS
