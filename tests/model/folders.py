"""Copies of a tiny checkpoint with something changed."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from apcbatch import Engine
from apcbatch.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
REMOVED = object()


def refused(folder: Path, sentence: str) -> None:
    """The folder is refused in a sentence of sane length."""
    with pytest.raises(ModelError, match=sentence) as caught:
        Engine(folder, pool_size_bytes=1 << 20, max_running=2)
    assert len(str(caught.value)) < 700 and str(caught.value).isprintable()


def copy_of(folder: Path, target: Path) -> Path:
    """The same checkpoint in another folder."""
    return Path(shutil.copytree(folder, target))


def with_config(folder: Path, target: Path, **changes: object) -> Path:
    """A copy with other values in config.json; REMOVED takes a key out."""
    path = copy_of(folder, target) / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not REMOVED}))
    return target


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in one file."""
    return load_file(folder / SINGLE)


def with_weights(folder: Path, target: Path, changes: Mapping[str, Any]) -> Path:
    """A copy with other tensors; REMOVED takes one out."""
    tensors = load_file(copy_of(folder, target) / SINGLE) | dict(changes)
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not REMOVED}
    save_file(kept, target / SINGLE, metadata={"format": "pt"})
    return target


def multimodal(
    folder: Path,
    target: Path,
    model_type: str = "qwen3_5",
    architecture: str = "Qwen3_5ForConditionalGeneration",
) -> Path:
    """The same text model of Qwen3.5 as a multimodal checkpoint: nested, under another prefix, with a vision tower and
    heads that predict further tokens."""
    text = json.loads((folder / "config.json").read_text())
    tied = text.pop("tie_word_embeddings", False)
    nested = {key: value for key, value in text.items() if key != "architectures"}
    nested |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "full_attention_interval": 4,
               "mtp_num_hidden_layers": 1}  # fmt: skip
    values = {"architectures": [architecture], "model_type": model_type, "text_config": nested,
              "vision_config": {"depth": 2}, "image_token_id": 90, "tie_word_embeddings": tied}  # fmt: skip
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(values))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights_of(folder).items()
    }
    tensors |= {"mtp.fc.weight": torch.ones(3), "mtp.norm.weight": torch.ones(1),
                "model.visual.patch_embed.proj.weight": torch.ones(2, 2, dtype=torch.int32)}  # fmt: skip
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def sharded(folder: Path, target: Path, shards: int = 3) -> Path:
    """A copy in several files with an index, tensor by tensor in turn."""
    tensors = load_file(copy_of(folder, target) / SINGLE)
    (target / SINGLE).unlink()
    names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    weight_map = {tensor: names[number % shards] for number, tensor in enumerate(sorted(tensors))}
    for name in names:
        part = {tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}
        save_file(part, target / name, metadata={"format": "pt"})
    write_index(target, weight_map)
    return target


def weight_map_of(folder: Path) -> dict[str, str]:
    """What the index says."""
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def write_index(folder: Path, weight_map: object) -> None:
    """Write the index of a sharded checkpoint."""
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """(the header, the bytes behind it) of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_safetensors(path: Path, header: Mapping[str, Any] | bytes, data: bytes, length: int = -1) -> None:
    """A safetensors file with any header; length: what it says of the header's length, -1 for the truth."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length < 0 else length) + raw + data)
