"""How much each property test tries: `pytest --effort N`, 1 in `make test` and 10 in `make test-all`; and tables whose
rows are one test."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import wraps
from itertools import combinations
from typing import Any
from unittest.util import safe_repr

import pytest

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


def table(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`pytest.mark.parametrize` as one test, for rows of a few milliseconds: the first row that fails is named.
    `tmp_path` and `monkeypatch` are a row's own; every other fixture is shared by all rows."""
    keys, all_values = names.replace(",", " ").split(), list(rows)
    assert all_values, "a table without rows tests nothing"

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def test(**given: Any) -> None:
            for number, row in enumerate(all_values):
                own = given | dict(zip(keys, [row] if len(keys) == 1 else row, strict=True))
                with ExitStack() as stack:
                    if "tmp_path" in given:
                        own["tmp_path"] = given["tmp_path"] / f"row{number}"
                        own["tmp_path"].mkdir()
                    if "monkeypatch" in given:
                        own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
                    try:
                        function(**own)
                    except (Exception, pytest.fail.Exception) as error:
                        raise AssertionError(f"row {number}, {safe_repr(row)[:300]}: {error}") from error

        given = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature([one for one in given if one.name not in keys])  # type: ignore[attr-defined]
        return test

    return decorate


def _effort() -> int:
    return int(os.environ.get(VARIABLE, "1"))
