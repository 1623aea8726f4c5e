"""The logits of all families against those of transformers, on tiny random checkpoints with odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apcbatch.model.families import load_model_config
from tests.model.families import ROWS
from tests.model.folders import weights_of
from tests.model.parity import LENGTHS, assert_equals_oracle
from tests.tiny import load_oracle

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


@pytest.mark.drawn(4)
@pytest.mark.parametrize("family", ROWS)
def test_tiny_checkpoints_are_those_of_transformers(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Fault: a tensor or a size of config.json that only our loader knows, or one that it passes over: transformers
    reads a checkpoint and writes the same tensors, and its config.json, which has all keys, is the same ModelConfig."""
    folder = tiny_checkpoint(family)
    load_oracle(folder).save_pretrained(tmp_path)
    ours, theirs = weights_of(folder), weights_of(tmp_path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert load_model_config(folder) == load_model_config(tmp_path)
