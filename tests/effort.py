"""How much each property test tries: `pytest --effort N`, 1 in `make test` and 10 in `make test-all`."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from itertools import combinations

VARIABLE = "TEST_EFFORT"  # set by tests/conftest.py before any test is collected, and inherited by child processes


def tries(full: int) -> int:
    """How many draws to try: `full` of them at effort 10, in proportion below (at least one) and above."""
    return max(1, full * _effort() // 10)


def seeds(full: int) -> Iterator[int]:
    """Seeds drawn from `random`, as many as `tries`, each printed: of a test that fails, the last one is at fault."""
    for _ in range(tries(full)):
        seed = random.randrange(1 << 31)
        print(f"seed {seed}")
        yield seed


def is_full() -> bool:
    """Whether everything is tried: effort 10 and above."""
    return _effort() >= 10


def pairwise(rows: Sequence[Sequence[str]]) -> set[int]:
    """Indices of rows such that each two values that meet in any row meet in one of these, chosen greedily."""
    left = [set(combinations(enumerate(row), min(2, len(row)))) for row in rows]
    chosen: set[int] = set()
    while any(left):
        best = max(range(len(rows)), key=lambda index: len(left[index]))
        chosen.add(best)
        covered = left[best]
        left = [pairs - covered for pairs in left]
    return chosen


def _effort() -> int:
    return int(os.environ.get(VARIABLE, "1"))
