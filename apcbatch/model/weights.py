"""The tensors of a checkpoint: safetensors, single or sharded with an index.

Must not know: what the tensors mean. Invariants: every tensor is asked for exactly once, with its shape; a missing, a
surplus or a mis-shaped tensor is an error that names the tensor and its file; pickle formats are never opened.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from apcbatch.errors import ModelError
from apcbatch.model.hf_config import load_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """Named tensors of one model folder, each taken to one device, and the digest of everything that was taken."""

    def __init__(self, model_dir: Path, device: torch.device) -> None:
        self._device = device
        self.model_dir = model_dir
        self._files: dict[Path, Any] = {}  # safe_open has no types
        self._where = self._locate()
        self._digests: dict[str, bytes] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, which must have exactly `shape`, in the file's floating-point dtype."""
        path = self._where.get(name)
        if path is None:
            raise ModelError(
                f"{self.model_dir}: tensor {name} is missing; expected one of shape {list(shape)}"
            )
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(
                f"{path}: tensor {name} cannot be read ({error}); copy the checkpoint again"
            ) from None
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{path}: tensor {name} has shape {list(tensor.shape)}; expected {list(shape)}")
        if not tensor.dtype.is_floating_point:
            raise ModelError(f"{path}: tensor {name} has dtype {tensor.dtype}; expected a floating-point one")
        label = f"{name} {tensor.dtype} {list(shape)}".encode()
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        self._digests[name] = xxhash.xxh3_128_digest(content) + label
        return tensor.to(self._device)

    def finish(self) -> bytes:
        """Digest of all tensors by name, whatever their files; ModelError where a tensor was never asked for."""
        surplus = sorted(set(self._where) - set(self._digests))
        if surplus:
            more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
            raise ModelError(
                f"{self._where[surplus[0]]}: tensor {surplus[0]}{more} is not part of this architecture; "
                "check architectures and the layer sizes in config.json"
            )
        digest = xxhash.xxh3_128()
        for name in sorted(self._digests):
            digest.update(self._digests[name])
        return digest.digest()

    def _locate(self) -> dict[str, Path]:
        """The file of every tensor, each file opened and its header read."""
        index = self.model_dir / INDEX
        if not index.exists():
            path = self.model_dir / SINGLE
            return dict.fromkeys(self._open(path).keys(), path)
        weight_map = load_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ModelError(
                f"{index}: weight_map is missing; expected an object of tensor names and file names"
            )
        where: dict[str, Path] = {}
        for file_name in sorted(set(weight_map.values())):
            if Path(file_name).name != file_name:
                raise ModelError(
                    f"{index}: file {file_name!r} is outside the model folder; expected a plain file name"
                )
            path = self.model_dir / file_name
            where.update(dict.fromkeys(self._open(path).keys(), path))
        for name, file_name in weight_map.items():
            if name not in where or where[name].name != file_name:
                raise ModelError(
                    f"{self.model_dir / file_name}: tensor {name} is missing; {INDEX} lists it there"
                )
        return where

    def _open(self, path: Path) -> Any:
        try:
            self._files[path] = safe_open(path, framework="pt")
        except FileNotFoundError:
            found = (
                "pickle weights, which are never opened"
                if list(self.model_dir.glob("*.bin"))
                else "no weights"
            )
            raise ModelError(
                f"{path} does not exist; the folder holds {found}; expected safetensors"
            ) from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a whole safetensors file ({error}); copy it again") from None
        return self._files[path]
