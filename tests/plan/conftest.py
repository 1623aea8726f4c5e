"""Random datasets for the tests of the plan."""

from __future__ import annotations

import random

import pytest

from tests.effort import tries
from tests.plan.plan_oracle import Dataset, random_dataset


@pytest.fixture(params=range(tries(100)))
def data(request: pytest.FixtureRequest) -> Dataset:
    """One of tries(100) drawn datasets; it names the seed that makes it again."""
    return random_dataset(random.getrandbits(32))
