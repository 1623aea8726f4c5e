"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from apcbatch.kernels.isa import available_isas, set_isa
from apcbatch.kernels.isa import isa as isa_in_use


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has, in use during the test."""
    before = isa_in_use()
    set_isa(request.param)
    yield request.param
    set_isa(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors are made during the test, and so where the ops run."""
    with torch.device(request.param):
        yield request.param
