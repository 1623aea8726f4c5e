"""Slices of the shared conversations, planned once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.runs import Planned, first, planned
from tests.plan.plan_oracle import Dataset
from tests.plan.test_plan_cases import read_words


@pytest.fixture(scope="session")
def tau_data(shared_data: Path) -> Dataset:
    """Customer service: long stems that many conversations share."""
    return read_words(shared_data / "tau_bench.jsonl", 60)


@pytest.fixture(scope="session")
def tau(tau_data: Dataset) -> Planned:
    return planned(first(tau_data, 16))
