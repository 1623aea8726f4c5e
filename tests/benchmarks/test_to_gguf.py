"""The conversion to GGUF: every weight arrives under llama.cpp's name with its values. Needs the package `gguf`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.make_shapes import write_shape
from tests.benchmarks.small_shapes import small

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")


def converted(folder: Path, shape: str, type_name: str) -> dict[str, np.ndarray]:
    """The tensors of the GGUF file of a small shape, as float32."""
    from benchmarks.to_gguf import convert

    write_shape(folder, small(shape))
    target = folder / "model.gguf"
    convert(folder, target, type_name)
    tensors = gguf.GGUFReader(target).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors}


@pytest.mark.parametrize("shape", ["mamba-130m", "jamba-small"])
@pytest.mark.parametrize("type_name", ["f32", "bf16"])
def test_values_round_trip(tmp_path: Path, shape: str, type_name: str) -> None:
    """Faults: a tensor dropped, transposed or renamed; A without its sign; bfloat16 weights that are rounded."""
    made = converted(tmp_path, shape, type_name)
    given = {name: tensor.float().numpy() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    layer = "backbone.layers.0.mixer" if shape == "mamba-130m" else "model.layers.0.mamba"
    np.testing.assert_array_equal(made["blk.0.ssm_a"], -np.exp(given[f"{layer}.A_log"]))
    np.testing.assert_array_equal(made["blk.0.ssm_in.weight"], given[f"{layer}.in_proj.weight"])
    np.testing.assert_array_equal(made["blk.0.ssm_conv1d.weight"], given[f"{layer}.conv1d.weight"][:, 0])
    assert sum(v.size for v in made.values()) == sum(v.size for v in given.values())


def test_experts_are_stacked_in_order(tmp_path: Path) -> None:
    """Fault: experts sorted as text, so that the router's rows point at others."""
    made = converted(tmp_path, "jamba-small", "f32")
    given = load_file(tmp_path / "model.safetensors")
    for expert in range(json.loads((tmp_path / "config.json").read_text())["num_experts"]):
        name = f"model.layers.1.feed_forward.experts.{expert}.up_proj.weight"
        np.testing.assert_array_equal(made["blk.1.ffn_up_exps.weight"][expert], given[name].float().numpy())
