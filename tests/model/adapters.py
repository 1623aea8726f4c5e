"""Adapters as peft writes them, and the weights that they make, by the formula in NumPy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

FILES = ("adapter_config.json", "adapter_model.safetensors")
RANK, ALPHA = 3, 5
Tensors = dict[str, torch.Tensor]


def lora_of(weights: Tensors, names: Iterable[str], seed: int = 0) -> Tensors:
    """The tensors of a LoRA of these weights, all of them matrices, by their names in a file."""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name in names:
        rows, columns = weights[name].shape
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, columns, generator=draw) * 0.3
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=draw) * 0.3
    return tensors


def save_adapter(folder: Path, tensors: Tensors, **changed: Any) -> Path:
    """Write an adapter folder. changed: keys of its adapter_config.json, beside those that peft writes."""
    ends = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in tensors}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": sorted(ends), "bias": "none",
              "base_model_name_or_path": "org/base", "fan_in_fan_out": False, "use_dora": False, "lora_dropout": 0.1,
              "modules_to_save": None, "init_lora_weights": True, "peft_version": "0.21.2", "rank_pattern": {},
              "alpha_pattern": {}, "task_type": "CAUSAL_LM", "megatron_core": "megatron.core"}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILES[0]).write_text(json.dumps({**config, **changed}))
    save_file(
        {name: one.clone(memory_format=torch.contiguous_format) for name, one in tensors.items()}, folder / FILES[1]
    )
    return folder


def merged_by_numpy(weights: Tensors, tensors: Tensors) -> Tensors:
    """The weights with a LoRA of matrices added, in float32, its sums in ascending order of the rank."""
    merged = dict(weights)
    for name, a in tensors.items():
        if ".lora_A." in name:
            rows, b = a.float().numpy(), tensors[name.replace(".lora_A.", ".lora_B.")].float().numpy()
            total = b[:, :1] * rows[:1]
            for k in range(1, len(rows)):
                total = total + b[:, k : k + 1] * rows[k : k + 1]
            weight = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            merged[weight] = torch.from_numpy(weights[weight].float().numpy() + np.float32(ALPHA / RANK) * total)
    return merged
