"""Mixtures of experts beyond the rows of their families: close or small scores, and experts packed in two tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apcbatch.errors import ModelError
from tests.model.folders import REMOVED, multimodal, weights_of, with_weights
from tests.model.parity import answers, assert_equals_oracle

pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoints = Callable[..., Path]


def test_small_scores_are_divided_as_in_transformers(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches another number than 1e-6 beside the sum of the scores: it halves the weight of a score of 1e-6."""
    plain = tiny_checkpoint("lfm2_moe", num_experts_per_tok=1)
    tensors = weights_of(plain)
    wide = {name: 12 * tensor for name, tensor in tensors.items() if name.endswith("feed_forward.gate.weight")}
    always_the_third = torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0])
    biases = {name: always_the_third.clone() for name in tensors if name.endswith("expert_bias")}
    assert len(wide) == len(biases) == 3
    assert_equals_oracle(with_weights(plain, tmp_path / "m", wide | biases), 65, 1e-5, monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bias_of_the_choice_is_not_rounded(dtype: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches a bias, in the checkpoint float32 for every dtype, that is rounded to the dtype of the run: other experts
    are chosen where scores are close."""
    name = "backbone.layers.1.mixer.gate.e_score_correction_bias"
    same = torch.full((6,), 1.0)
    last = same.index_fill(0, torch.tensor([4, 5]), 1.0 + 2**-20)
    flat = {"backbone.layers.1.mixer.gate.weight": torch.zeros(6, 36)}
    folder = tiny_checkpoint("nemotron_h", num_experts_per_tok=2, topk_group=1)
    found = [answers(with_weights(folder, tmp_path / str(i), {**flat, name: bias}), dtype=dtype)[1]
             for i, bias in enumerate((same, last))]  # fmt: skip
    assert found[0] != found[1]


def with_packed_experts(folder: Path, target: Path, *parts: str) -> Path:
    """The same model with the experts of a layer in two tensors, as released checkpoints have them. parts: the names of
    an expert's gate, up and down projections."""
    tensors, packed = weights_of(folder), {}
    for begin in sorted({name.split("experts.")[0] for name in tensors if ".experts." in name}):
        count = sum(name.startswith(f"{begin}experts.") and parts[2] in name for name in tensors)
        gate, up, down = (
            torch.stack([tensors[f"{begin}experts.{i}.{part}.weight"] for i in range(count)]) for part in parts
        )
        packed |= {f"{begin}experts.gate_up_proj": torch.cat([gate, up], 1), f"{begin}experts.down_proj": down}
    assert packed
    return with_weights(folder, target, {name: REMOVED for name in tensors if ".experts." in name} | packed)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("family, parts", [
    ("qwen3_5_moe", ("gate_proj", "up_proj", "down_proj")), ("lfm2_moe", ("w1", "w3", "w2")),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_found_under_either_name(
    family: str, parts: tuple[str, ...], dtype: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a released checkpoint with packed experts that is refused, or whose gate and up are swapped, where
    `save_pretrained` writes each expert by itself."""
    folder = tiny_checkpoint(family)
    packed = with_packed_experts(folder, tmp_path / "packed", *parts)
    assert answers(packed, dtype=dtype)[1] == answers(folder, dtype=dtype)[1]


def test_packed_experts_of_a_multimodal_checkpoint_are_found(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches a released checkpoint, nested and with packed experts, that is refused, and a sentence about a tensor
    under a name that no file has."""
    folder = tiny_checkpoint("qwen3_5_moe")
    packed = with_packed_experts(folder, tmp_path / "packed", "gate_proj", "up_proj", "down_proj")
    whole = multimodal(packed, tmp_path / "whole", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")
    assert answers(whole)[1] == answers(folder)[1]
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ModelError, match=f"tensor {name} is missing; expected one of shape .5, 36, 20."):
        answers(with_weights(whole, tmp_path / "missing", {name: REMOVED}))
