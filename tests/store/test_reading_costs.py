"""What reading a snapshot costs, kept in a store."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from apcbatch.store import Store, find_cost
from apcbatch.store.reading_costs import COSTS_NAME, MOST_COSTS, ReadingCost, read_costs
from tests.effort import table

HERE = ("m", "float32", "cpu, 2 threads")


def opened(folder: Path, **options: bool) -> Store:
    return Store.open(folder, warn=lambda sentence: pytest.fail(sentence), **options)


def never() -> int:
    raise AssertionError("it is measured though the store knows it")


def test_each_is_measured_once(tmp_path: Path) -> None:
    """Catches a second number for one model, dtype and device, and one that serves another."""
    others = [("n", "float32", HERE[2]), ("m", "bfloat16", HERE[2]), ("m", "float32", "a GPU")]
    with opened(tmp_path) as store:
        for tokens, cost in enumerate([HERE, *others], start=5):
            assert store.reading_tokens(*cost, lambda tokens=tokens: tokens) == tokens
    with opened(tmp_path) as store:
        assert [store.reading_tokens(*cost, never) for cost in [HERE, *others]] == [5, 6, 7, 8]
    assert find_cost(tmp_path, *HERE).tokens == 5
    assert find_cost(tmp_path, "m", "float32").device == "a GPU"
    assert find_cost(tmp_path, "k", "float32") is None
    assert os.listdir(tmp_path / "tmp") == []


def test_what_is_unknown_is_not_kept(tmp_path: Path) -> None:
    """Catches a guess that later runs take for a measurement."""
    with opened(tmp_path) as store:
        assert store.reading_tokens(*HERE, lambda: None) is None
        assert read_costs(tmp_path) == []
    with opened(tmp_path, read_only=True) as store:
        assert store.reading_tokens(*HERE, never) is None
        assert store.time_reading(b"f" * 32, 1, {"x": np.zeros(3, np.float32)}) is None


@table(
    "content",
    [b"", b"{", b"{}", b"[1]", b'[{"tokens": 5}]', b"\xff" * 9, b" " * (1 << 21),
     b'[{"model": "m", "dtype": "float32", "device": "cpu, 2 threads", "tokens": 0}]',
     b'[{"model": "m", "dtype": "float32", "device": "cpu, 2 threads", "tokens": true}]',
     b'[{"model": "m", "dtype": "float32", "device": ["cpu, 2 threads"], "tokens": 5}]',
     b'[{"model": "m", "dtype": "float32", "device": "cpu, 2 threads", "tokens": 9999999999}]'],
)  # fmt: skip
def test_a_damaged_file_is_replaced(content: bytes, tmp_path: Path) -> None:
    """Catches a file that stops every run of the store, and a number that no option would take."""
    opened(tmp_path).close()
    (tmp_path / COSTS_NAME).write_bytes(content)
    with opened(tmp_path) as store:
        assert store.reading_tokens(*HERE, lambda: 5) == 5
    assert read_costs(tmp_path) == [ReadingCost(*HERE, 5)]


def test_the_oldest_are_dropped(tmp_path: Path) -> None:
    """Catches a file that grows with every model that is tried, until it is too large to be read."""
    with opened(tmp_path) as store:
        for number in range(MOST_COSTS + 3):
            store.reading_tokens(f"m{number}", "float32", "cpu", lambda: 5)
    assert [cost.model for cost in read_costs(tmp_path)] == [f"m{number}" for number in range(3, MOST_COSTS + 3)]


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """Fault: a run ends, or measures each time in silence, because the costs cannot be kept."""
    told: list[str] = []
    with Store.open(tmp_path, warn=told.append) as store:
        (tmp_path / COSTS_NAME).mkdir()
        assert store.reading_tokens(*HERE, lambda: 5) == 5
    assert len(told) == 1 and "keeping what reading a snapshot costs failed" in told[0]


def test_reading_is_timed_on_a_file_of_its_own(tmp_path: Path) -> None:
    """Catches arrays that timing changes, and a file that it leaves."""
    arrays = {"x": np.random.default_rng().random((3, 1000), np.float32), "y": np.arange(7, dtype=np.uint16)}
    before = {name: array.copy() for name, array in arrays.items()}
    with opened(tmp_path) as store:
        seconds = store.time_reading(b"f" * 32, 1, arrays)
        assert seconds is not None and seconds > 0
        [left] = os.listdir(tmp_path / "tmp")
        assert left.endswith(".lock"), "of the session"
        assert store.stats().entries == 0
    assert all(np.array_equal(array, before[name]) for name, array in arrays.items())
