"""--dtype auto: what config.json declares and what the weights are, and where it is resolved."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from apcbatch.config import Config
from apcbatch.model.own_dtype import own_dtype, with_own_dtype
from apcbatch.resolution import resolve
from tests.effort import table

BIG, SMALL = (64,), (3,)


def folder_with(folder: Path, config: dict[str, object], weights: dict[str, str]) -> Path:
    """A folder with a config.json, and with a file of weights if there are any: a name ending in `+` is a big one."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: torch.zeros(BIG if name.endswith("+") else SMALL, dtype=getattr(torch, dtype))
        for name, dtype in weights.items()
    }
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


@table("config, weights, dtype, said", [
    ({"torch_dtype": "bfloat16"}, {}, "bfloat16", ""),
    ({"torch_dtype": "torch.bfloat16"}, {"a": "bfloat16"}, "bfloat16", ""),
    ({"dtype": "bfloat16", "torch_dtype": "float32"}, {}, "bfloat16", ""),
    ({"dtype": "float32", "text_config": {"torch_dtype": "bfloat16"}}, {}, "bfloat16", ""),
    ({"dtype": "bfloat16", "text_config": {"hidden_size": 8}}, {}, "bfloat16", ""),
    ({"torch_dtype": "float64"}, {"a": "float64"}, "float32", ""),
    ({"torch_dtype": "float16"}, {}, "bfloat16", "float16 and are rounded to bfloat16; --dtype float32"),
    ({"torch_dtype": "float16"}, {"a": "float16"}, "bfloat16", "float16 and are rounded to bfloat16"),
    ({"torch_dtype": "float16"}, {"a": "bfloat16"}, "bfloat16", ""),
    ({"torch_dtype": "bfloat16"}, {"a": "float16"}, "bfloat16", "float16 and are rounded to bfloat16"),
    ({"torch_dtype": "bfloat16"}, {"a": "float32"}, "bfloat16", "declares bfloat16, and most of its weights are f"),
    ({"torch_dtype": "float32"}, {"a": "bfloat16"}, "float32", "--dtype bfloat16 computes them in bfloat16"),
    ({"torch_dtype": "float32"}, {"a": "float16"}, "float32", "weights are float16: they are computed in float32"),
    ({}, {"a": "float32", "b": "float32", "c+": "bfloat16"}, "bfloat16", ""),
    ({}, {"a": "bfloat16", "c+": "float32"}, "float32", ""), ({}, {"a": "float16"}, "bfloat16", "rounded"),
    ({}, {"a": "bfloat16", "places+": "int64"}, "bfloat16", ""), ({}, {}, "float32", ""),
    ({"torch_dtype": "int8"}, {"a": "bfloat16"}, "bfloat16", ""),
    ({"torch_dtype": ["float32"], "dtype": None}, {"a": "bfloat16"}, "bfloat16", ""),
])  # fmt: skip
def test_the_dtype_of_a_checkpoint(tmp_path, config, weights, dtype, said):
    """Fault: a bfloat16 checkpoint takes twice its memory, or weights lose precision and no line says so."""
    sentences: list[str] = []
    assert own_dtype(folder_with(tmp_path, config, weights), sentences.append) == dtype
    assert bool(sentences) == bool(said) and said in "".join(sentences) and len(sentences) < 2


def test_shards_count_together_and_damaged_ones_not_at_all(tmp_path):
    """Fault: the first shard speaks for all of them; a file cut short, or a name that leaves the folder, is read or
    ends in a traceback in place of the sentence of loading."""
    for name, dtype in (("one", "float32"), ("two+", "bfloat16")):
        made = folder_with(tmp_path / name, {}, {name: dtype}) / "model.safetensors"
        made.rename(tmp_path / f"{name[:3]}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    shards = {"one": "one.safetensors", "two+": "two.safetensors"}
    for listed, dtype in (
        (shards, "bfloat16"),
        ({"one": "one.safetensors"}, "float32"),
        (shards | {"x": "missing.safetensors"}, "float32"),
        (shards | {"x": 3}, "float32"),
        ({"two+": str(tmp_path / "two+" / "two.safetensors")}, "float32"),
    ):
        index.write_text(json.dumps({"weight_map": listed}))
        assert own_dtype(tmp_path, print) == dtype
    (tmp_path / "two.safetensors").write_bytes(b"\x08")
    assert own_dtype(tmp_path, print) == "float32"


def test_the_resolved_value_keeps_where_it_came_from(tmp_path):
    """Fault: a given dtype is replaced; `--dtype auto` is left out of the command that continues; a default is said to
    be given."""
    model = str(folder_with(tmp_path, {"dtype": "bfloat16"}, {}))
    for flags, dtype, origin in (
        ({}, "bfloat16", "auto: the checkpoint's own"),
        ({"dtype": "auto"}, "bfloat16", "--dtype auto: the checkpoint's own"),
        ({"dtype": "float32"}, "float32", "--dtype"),
    ):
        config = with_own_dtype(resolve({"model": model, **flags}, {}, {}, ""))
        assert (config.dtype, config.origins["dtype"]) == (dtype, origin)
        assert with_own_dtype(config) == config
    assert with_own_dtype(Config()).dtype == "bfloat16", "the bundled model's"
