"""Quantised checkpoints are refused by name: by config.json before a weight is read, by dtype where it says nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apcbatch import Engine
from apcbatch.cli.program import main
from apcbatch.errors import ModelError
from apcbatch.model.families import load_model_config
from apcbatch.model.locate import DEMO_DIR
from apcbatch.model.quantization import FLOATING, check_floating
from tests.effort import table
from tests.model.folders import SINGLE, refused, sharded, weights_of, with_config, with_weights

Checkpoints = Callable[..., Path]

# As checkpoints on the hub have them.
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "bitsandbytes": {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "a-new-one": {"quant_method": "a-new-one"},
}


BITSANDBYTES = r"with 'bitsandbytes' \(8-bit or 4-bit numbers of bitsandbytes\)"


@table("family, changes, sentence", [
    *((family, {"quantization_config": config}, f"config.json: quantization_config says .* with '{method}'.*: give the")
      for method, config in CONFIGS.items() for family in ("mamba", "jamba")),
    ("mamba", {"compression_config": CONFIGS["compressed-tensors"]}, "with 'compressed-tensors'"),
    ("mamba", {"text_config": {"quantization_config": CONFIGS["fp8"]}}, "with 'fp8'"),
    *(("mamba", {"quantization_config": config}, "by a method that it does not name")
      for config in ("fp8", [1], {"bits": 4}, {"load_in_4bit": False})),
    *(("mamba", {"quantization_config": {"quant_method": method}}, "quantised ")
      for method in (["x"] * 10_000, "x" * 10_000)),
    *(("mamba", {"quantization_config": {name: True}}, BITSANDBYTES) for name in ("load_in_8bit", "load_in_4bit")),
    ("mamba", {"quantization_config": {"load_in_4bit": True, "quant_method": "GPTQ"}}, r"'GPTQ' \(packed integers"),
])  # fmt: skip
def test_a_quantised_model_is_refused_by_its_method(
    family: str, changes: dict[str, Any], sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: the method is not read, or an older key, that of a text model inside, or a value of another form passes or
    floods the page, and the weights' numbers are taken without their scales. No weight is looked at: there is none."""
    folder = with_config(tiny_checkpoint(family), tmp_path / "m", **changes)
    (folder / SINGLE).unlink()
    refused(folder, "says that the weights are quantised .*; quantised weights are not")
    with pytest.raises(ModelError, match=sentence):
        load_model_config(folder)


@table("dtype, meant", [
    ("F8_E8M0", "8-bit floating point"), ("I8", "int8"), ("F4", "packed floating point"),
    ("F6_E2M3", "packed floating point"), ("I64", None), ("BOOL", None), *((name, "") for name in FLOATING),
])  # fmt: skip
def test_a_dtype_is_named_by_what_it_usually_stands_for(dtype: str, meant: str | None) -> None:
    """Fault: a checkpoint of integers is called quantised, or a dtype that torch does not have yet passes."""
    assert FLOATING == {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    if meant == "":
        check_floating(Path("w"), "t", dtype)
        return
    with pytest.raises(ModelError) as raised:
        check_floating(Path("w"), "t" * 200, dtype)
    start = f"w: tensor {'t' * 120} has dtype {dtype}; expected one of F64, F32, F16, BF16"
    assert str(raised.value).startswith(start)
    assert str(raised.value)[len(start) :].partition(":")[0] == (
        f", as {meant} weights have it" if meant is not None else ""
    )


@table("nothing", [None, {}])
def test_a_config_that_says_nothing_is_taken(nothing: object, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a null, which some tools write for weights that are not quantised, is refused."""
    folder = with_config(tiny_checkpoint("mamba"), tmp_path / "m", quantization_config=nothing)
    assert load_model_config(folder) == load_model_config(tiny_checkpoint("mamba"))


@table("dtype, meant", [
    (torch.float8_e4m3fn, "8-bit floating point"), (torch.float8_e5m2, "8-bit floating point"), (torch.int8, "int8"),
    (torch.uint8, "int8, or packed 4-bit"), (torch.int32, "packed integer"),
])  # fmt: skip
def test_quantised_tensors_without_a_word_are_refused(
    dtype: torch.dtype, meant: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: where config.json says nothing, a quantised matrix of the last layer is found only when the others are
    read; or a packed one is refused for its shape, which sends its reader to config.json."""
    name = "model.layers.3.mamba.out_proj.weight"
    single = tiny_checkpoint("jamba")
    matrix = weights_of(single)[name]
    said = f"as {meant} weights have it: quantised weights are not supported: give the unquantised checkpoint$"
    for number, packed in enumerate((matrix.to(dtype), matrix[:, ::4].contiguous().to(dtype))):
        folder = sharded(with_weights(single, tmp_path / f"a{number}", {name: packed}), tmp_path / f"b{number}")
        refused(folder, f"-of-00003.safetensors: tensor {name} has dtype .*{said}")


def test_no_tensor_is_read_before_all_dtypes_are_known(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: gigabytes are read before the first quantised tensor is met."""
    from apcbatch.model.weights import Checkpoint

    def read(checkpoint: Checkpoint, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "_read", read)
    name = "backbone.layers.1.mixer.out_proj.weight"
    single = tiny_checkpoint("mamba")
    folder = with_weights(single, tmp_path / "m", {name: weights_of(single)[name].to(torch.float8_e4m3fn)})
    with pytest.raises(ModelError, match=f"tensor {name} has dtype F8_E4M3; "):
        Engine(folder, pool_size_bytes=1 << 20)


def test_doctor_and_plan_say_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Fault: doctor passes a model that no run takes, or plan forecasts a run that cannot be."""
    folder = with_config(DEMO_DIR, tmp_path / "m", quantization_config=CONFIGS["awq"])
    sentence = (
        "quantised with 'awq' (packed integers of AWQ); quantised weights are not supported: give the unquantised"
    )
    assert main(["doctor", "--model", str(folder), "--device", "cpu"]) == 1
    [line] = [one for one in capsys.readouterr().out.splitlines() if one.split()[1] == "model"]
    assert line.startswith("FAIL") and sentence in line
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    assert main(["plan", str(tmp_path / "in.jsonl"), "--model", str(folder)]) == 2
    assert sentence in capsys.readouterr().err
