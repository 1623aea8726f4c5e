"""Checkpoints with more than a text model: nested, under other names, with tensors that are not run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apcbatch.data.end_tokens import read_end_tokens
from apcbatch.errors import ModelError
from apcbatch.model.families import family_of, load_model_config
from apcbatch.model.weight_files import WeightFiles, ignored_tensors
from tests.effort import table
from tests.model.folders import REMOVED, multimodal, refused, sharded, weights_of, with_config, with_weights
from tests.model.parity import answers

pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoints = Callable[..., Path]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_text_of_a_multimodal_checkpoint_is_read(
    dtype: str, tied: bool, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a nested value, a prefix or a part beside the text model that changes the answers: the checkpoint has the
    name and the bits of its text model alone, in one file or in several."""
    text = tiny_checkpoint("qwen3_5", tie_word_embeddings=tied)
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights_of(text).items()}
    text = with_weights(text, tmp_path / "text", tensors)
    folder = multimodal(text, tmp_path / "whole")
    expected = answers(text, dtype=dtype)
    assert answers(folder, dtype=dtype) == expected
    assert answers(sharded(folder, tmp_path / "sharded"), dtype=dtype) == expected
    ignored = family_of(load_model_config(folder)).ignored
    with WeightFiles(text) as plain, WeightFiles(folder) as files:
        assert ignored_tensors(plain, ignored) is None
        said = ignored_tensors(files, ignored)
    assert said == f"{folder}: 3 tensors are ignored, of parts that are not run (2 of mtp.*, 1 of model.visual.*)"


def test_heads_that_predict_further_tokens_are_ignored(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches a checkpoint that is refused for, or changed by, tensors that are not run."""
    folder = tiny_checkpoint("nemotron_h")
    more = with_weights(folder, tmp_path / "m", {"mtp.layers.0.norm.weight": torch.ones(3)})
    assert answers(more) == answers(folder)
    with WeightFiles(more) as files:
        said = ignored_tensors(files, family_of(load_model_config(more)).ignored)
    assert said == f"{more}: 1 tensors are ignored, of parts that are not run (1 of mtp.*)"


def test_errors_name_tensors_as_the_files_do(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches a sentence about a tensor under a name that no file has."""
    folder = multimodal(tiny_checkpoint("qwen3_5"), tmp_path / "m")
    name = "model.language_model.layers.0.linear_attn.in_proj_z.weight"
    for number, (tensor, changed, expected) in enumerate([
        (name, REMOVED, "is missing; expected one of shape"),
        (name, torch.zeros(3, 3), r"has shape \[3, 3\]; expected"),
        ("model.language_model.embed_tokens.weight", REMOVED, "is missing; expected one of shape"),
        ("model.language_model.extra", torch.zeros(3), "is not part of this architecture"),
    ]):  # fmt: skip
        refused(with_weights(folder, tmp_path / str(number), {tensor: changed}), f"tensor '?{tensor}'? {expected}")


@table("text", [3, [], "x"])
def test_a_nested_text_config_is_an_object(text: object, tmp_path: Path) -> None:
    """Catches a traceback, and the defaults in the place of what is written."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    with pytest.raises(ModelError, match="text_config is .*; expected an object"):
        load_model_config(tmp_path)


def test_stop_tokens_and_tying_are_found_on_either_level(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches an answer that never ends, and a head that is missing, because a value is on the other level, or both."""
    whole = multimodal(tiny_checkpoint("qwen3_5"), tmp_path / "m")
    text = json.loads((whole / "config.json").read_text())["text_config"]
    (whole / "generation_config.json").unlink(missing_ok=True)
    text["eos_token_id"] = [5, 6]
    nested = with_config(whole, tmp_path / "nested", tie_word_embeddings=REMOVED,
                         text_config={**text, "tie_word_embeddings": True}, eos_token_id=7)  # fmt: skip
    found = load_model_config(nested)
    assert found.tie_word_embeddings and list(read_end_tokens(nested, found.vocab_size).files) == [7, 5, 6]
    del text["eos_token_id"]
    top = load_model_config(with_config(whole, tmp_path / "top", eos_token_id=7,
                                        text_config={**text, "tie_word_embeddings": True}))  # fmt: skip
    assert not top.tie_word_embeddings and list(read_end_tokens(tmp_path / "top", top.vocab_size).files) == [7]
