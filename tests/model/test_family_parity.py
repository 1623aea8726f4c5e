"""The logits of all families against those of transformers, on tiny random checkpoints with odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.model.families import ROWS
from tests.model.parity import LENGTHS, assert_equals_oracle

CASES = [(family, case, length) for family, row in ROWS.items() for case in row.cases for length in LENGTHS]


@pytest.mark.drawn(26)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family, case, length", CASES)
def test_logits_equal_transformers(
    family: str, case: str, length: int, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches any departure from the architecture, in prefill, in decoding, or in company: a multiplier of another
    part, another number of rotated columns, limits of the step that hold in prefill alone, a bias of the choice of
    experts that reaches their weights."""
    row = ROWS[family]
    folder = tiny_checkpoint(family, row.seed, **row.cases[case])
    assert_equals_oracle(folder, length, row.tolerances.get(case, 1e-5), monkeypatch)
