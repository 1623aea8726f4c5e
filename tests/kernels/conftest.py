"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from apcbatch.kernels import ops


@pytest.fixture(params=ops.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has, in use during the test."""
    before = ops.isa()
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors are made during the test, and so where the ops run."""
    with torch.device(request.param):
        yield request.param


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """torch's thread count, and with it the kernels'."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
