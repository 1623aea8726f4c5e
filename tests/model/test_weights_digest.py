"""The digest of a checkpoint: a store's snapshots are found by it, so it stays what it was."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file

from apcbatch.model.weights import Checkpoint, _by_layer


def test_the_digest_is_of_names_dtypes_shapes_and_bytes(tmp_path: Path) -> None:
    """Catches a digest that depends on the order of asking or of threads, or that is another than before, so that no
    snapshot of an old store is found."""
    tensors = {
        f"layers.{i}.weight": torch.randn(i + 1, 3).to(dtype)
        for i, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16] * 5)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    whole = xxhash.xxh3_128()
    for name, tensor in sorted(load_file(tmp_path / "model.safetensors").items()):
        content = tensor.view(torch.uint8).numpy().tobytes()
        whole.update(xxhash.xxh3_128_digest(content) + f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    with Checkpoint(tmp_path, torch.device("cpu")) as checkpoint:
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.take(name, tuple(tensor.shape)), tensor)
        assert checkpoint.finish() == whole.digest()


def test_layers_come_first_in_their_order() -> None:
    """Fault: tensors are read ahead in another order than the one in which they are taken."""
    names = ["norm", "layers.10.b", "layers.2.z", "embedding", "layers.2.a"]
    assert sorted(names, key=_by_layer) == ["layers.2.a", "layers.2.z", "layers.10.b", "embedding", "norm"]
