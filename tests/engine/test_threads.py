"""How many threads a configuration gives to the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from apcbatch.config import Config
from apcbatch.cores import Cores
from apcbatch.engine import open
from apcbatch.kernels.processor import num_threads, set_threads


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The number of before, afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_number_is_taken_as_it_is() -> None:
    """Catches an option that nobody reads, and one that is cut to what is thought best."""
    open.use_processor(Config(threads=3))
    assert num_threads() == torch.get_num_threads() == 3


def test_the_default_is_no_more_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a container whose quota is not seen, and a torch that was told to use fewer."""
    cores = Cores(logical=8, physical=4, quota=None, nodes=1, huge_pages=None)
    monkeypatch.setattr(open, "find_cores", lambda: cores)
    for torch_uses, expected in ((16, 4), (4, 4), (2, 2)):
        torch.set_num_threads(torch_uses)
        open.use_processor(Config())
        assert num_threads() == expected
    torch.set_num_threads(4)
    monkeypatch.setattr(open, "find_cores", lambda: replace(cores, quota=1.5))
    open.use_processor(Config())
    assert num_threads() == 1


def test_no_threads_are_refused() -> None:
    """Catches a number that torch would answer with a sentence of its own."""
    with pytest.raises(ValueError, match="need at least one thread; asked for are 0"):
        set_threads(0)
