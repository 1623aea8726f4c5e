"""The tensors of a checkpoint: safetensors, single or sharded with an index.

Invariants: every tensor that the family does not ignore is taken exactly once, and its shape is checked; a missing,
surplus or mis-shaped tensor is an error that names the tensor and its file; only regular files with plain names in the
folder are opened, and never pickle formats.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from apcbatch.data.model_files import read_model_json
from apcbatch.errors import ModelError
from apcbatch.model.family import Family
from apcbatch.model.host_copies import finite_rows
from apcbatch.model.locate import what_it_is
from apcbatch.model.prefetch import Ahead
from apcbatch.model.quantization import FLOATING, check_floating
from apcbatch.regular_files import open_regular_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}\.safetensors")
MOST_THREADS = 8  # threads that read weights for a device
AHEAD_BYTES = 1 << 30
RESIDENT_SHARE = 32  # on the CPU, a 32nd of the weights is read ahead at most, and as much stays mapped once taken
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _File(NamedTuple):
    """A mapped file of weights. begin: offset of its data. tensors: entries of its header by name, each with `dtype`,
    `shape` and `data_offsets`."""

    memory: mmap.mmap
    begin: int
    tensors: Mapping[str, Any]


class Checkpoint:
    """Tensors of one model folder by name, each loaded onto one device, and the digest of all tensors taken.

    device_of: tensor name -> device, for a model on several devices; None: `device` for all. family: has the tensors'
    other names in files, which do not change the digest, and the tensors to ignore. Errors use the names in the files.
    ignored: prefix of ignored tensors -> their number, for the prefixes that the files have.
    """

    def __init__(
        self,
        model_dir: Path,
        device: torch.device,
        device_of: Callable[[str], torch.device] | None = None,
        family: Family | None = None,
    ) -> None:
        self._device, self._device_of = device, device_of or (lambda name: device)
        self.model_dir = model_dir
        self._files: dict[Path, _File] = {}
        self._where = self._locate()
        self._stored_names: dict[str, str] = {}  # name here -> name in the file
        self._prefix = ("", "")  # beginning of names here, and in the files
        self.ignored: dict[str, int] = {}
        if family is not None:
            self._ignore(family)
            self._rename(family)
        self._digests: dict[str, bytes] = {}
        self._ahead: Ahead[tuple[torch.Tensor, bytes]] | None = None  # made when the first tensor is taken
        self._most_mapped = AHEAD_BYTES
        self._mapped = 0  # bytes of the tensors taken since the last _unmap

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._unmap()
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def require(self, name: str, shape: tuple[int, ...]) -> Path:
        """Return the file of the tensor `name`. Raises ModelError unless its header gives exactly `shape` and a
        floating-point dtype."""
        path = self._where.get(name)
        if path is None:
            raise ModelError(
                f"{self.model_dir}: tensor {self._shown(name)} is missing; expected one of shape {list(shape)}"
            )
        found = self._header(name)
        check_floating(path, self._shown(name), found["dtype"])  # first, since packed weights have another shape too
        if tuple(found["shape"]) != shape:
            transposed = len(shape) == 3 and tuple(found["shape"]) == (shape[0], shape[2], shape[1])
            raise ModelError(
                f"{path}: tensor {self._shown(name)} has shape {found['shape']}; expected {list(shape)} by config.json"
                + "; convolutions are transposed by MLX: give the checkpoint that was converted to MLX" * transposed
            )
        return path

    def check_dtypes(self) -> None:
        """Raise ModelError for the first tensor, by name, with a quantised or unknown dtype. Reads headers only."""
        for name in sorted(self._where):
            check_floating(self._where[name], self._shown(name), self._header(name)["dtype"])

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each floating-point tensor by name, in the order of the layers; tensors outside the
        layers come last."""
        found = {name: self._header(name) for name in self._where}
        return {
            name: math.prod(found[name]["shape"]) * FLOATING[found[name]["dtype"]]
            for name in sorted(found, key=_by_layer)
            if found[name]["dtype"] in FLOATING
        }

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`, which must have exactly `shape`, in the file's floating-point dtype. An infinite
        number becomes NaN, which propagates, so that a damaged weight never gives a plausible answer."""
        self.require(name, shape)
        if self._ahead is None:
            self._ahead = self._read_ahead()
        tensor, self._digests[name] = self._ahead.take(name)
        self._mapped += tensor.nbytes
        if self._mapped > self._most_mapped:
            self._unmap()
        return tensor

    def _read_ahead(self) -> Ahead[tuple[torch.Tensor, bytes]]:
        """Return a prefetcher that reads the tensors, digests them and moves them to their devices."""
        sizes, on_host = self.sizes(), self._device.type == "cpu"
        threads = 1 if on_host else min(MOST_THREADS, os.cpu_count() or 1)
        if on_host:
            self._most_mapped = min(AHEAD_BYTES, sum(sizes.values()) // RESIDENT_SHARE)
        devices = {self._device_of(name) for name in sizes}
        streams = {device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"}
        return Ahead(partial(self._read, streams), sizes, threads=threads, most_bytes=self._most_mapped)

    def _unmap(self) -> None:
        """Release the mapped pages of the files, so that weights do not stay in memory beside their packed form. A
        tensor that is still in use is read from its file again."""
        self._mapped = 0
        for file in self._files.values():
            file.memory.madvise(mmap.MADV_DONTNEED)

    def _read(self, streams: Mapping[torch.device, torch.cuda.Stream], name: str) -> tuple[torch.Tensor, bytes]:
        """Return a tensor on its device, with infinities replaced by NaN, and the digest of its bytes in the file.
        streams: stream of each CUDA device that uses the tensor, so that its memory is not reused too early."""
        file, entry = self._files[self._where[name]], self._header(name)
        shape, offset = entry["shape"], file.begin + entry["data_offsets"][0]
        dtype = _DTYPES[entry["dtype"]]
        tensor = torch.frombuffer(file.memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
        label = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
        digest = xxhash.xxh3_128_digest(tensor.reshape(-1).view(torch.uint8).numpy().data) + label
        device = self._device_of(name)
        with torch.cuda.stream(streams[device]) if device in streams else nullcontext():
            tensor = tensor.to(device)
            if not finite_rows(tensor.reshape(1, -1)):
                tensor = tensor.where(tensor.isfinite(), math.nan)
        return tensor, digest

    def finish(self) -> bytes:
        """Return the digest of all tensors by name, independent of their files. Raises ModelError if a tensor was never
        taken."""
        surplus = sorted(set(self._where) - set(self._digests))
        if surplus:
            more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
            raise ModelError(
                f"{self._where[surplus[0]]}: tensor {self._shown(surplus[0])!r:.120}{more} is not part of this "
                "architecture; check architectures and the layer sizes in config.json"
            )
        digest = xxhash.xxh3_128()
        for name in sorted(self._digests):
            digest.update(self._digests[name])
        return digest.digest()

    def _ignore(self, family: Family) -> None:
        """Remove the tensors that the family ignores."""
        for prefix in family.ignored:
            names = [name for name in self._where if name.startswith(prefix)]
            for name in names:
                del self._where[name]
            if names:
                self.ignored[prefix] = len(names)

    def _rename(self, family: Family) -> None:
        """Rename tensors that have older names or another prefix in the files to the family's names."""
        renamed = {theirs: ours for theirs, ours in family.former_names.items() if theirs in self._where}
        for theirs, ours in family.prefixes.items():
            embedding = f"{family.embedding}.weight"
            if embedding not in self._where and theirs + embedding.removeprefix(ours) in self._where:
                self._prefix = ours, theirs
                names = [name for name in self._where if name.startswith(theirs)]
                renamed.update((name, ours + name.removeprefix(theirs)) for name in names)
        for theirs, ours in renamed.items():
            if ours not in self._where:
                self._where[ours] = self._where.pop(theirs)
                self._stored_names[ours] = theirs

    def _shown(self, name: str) -> str:
        """Return a tensor's name in the files; for a missing tensor, the name expected there."""
        if name in self._where:
            return self._stored_names.get(name, name)
        ours, theirs = self._prefix
        return theirs + name.removeprefix(ours) if name.startswith(ours) else name

    def _header(self, name: str) -> Any:
        """Return the safetensors header entry of a tensor: see _File."""
        return self._files[self._where[name]].tensors[self._stored_names.get(name, name)]

    def _locate(self) -> dict[str, Path]:
        """Open all files, which reads their headers, and return the file of every tensor."""
        index = self.model_dir / INDEX
        if not index.exists():
            path = self.model_dir / SINGLE
            return dict.fromkeys(self._open(path).tensors, path)
        weight_map = read_model_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ModelError(f"{index}: weight_map is missing; expected an object of tensor names and file names")
        where: dict[str, Path] = {}
        file_names = sorted(set(weight_map.values()))
        for file_name in file_names:
            if not _PLAIN_NAME.fullmatch(file_name):
                raise ModelError(
                    f"{index}: weight_map names {reprlib.repr(file_name)}; expected plain file names such as "
                    "model-00001-of-00002.safetensors"
                )
        missing = [name for name in file_names if not (self.model_dir / name).exists()]
        if missing:
            raise ModelError(
                f"{self.model_dir} lacks {len(missing)} of the {len(file_names)} files of weights that {INDEX} names: "
                f"{', '.join(missing[:3])}{', ..' * (len(missing) > 3)}; download the model again"
            )
        for file_name in file_names:
            path = self.model_dir / file_name
            where.update(dict.fromkeys(self._open(path).tensors, path))
        for name, file_name in weight_map.items():
            if name not in where or where[name].name != file_name:
                raise ModelError(f"{self.model_dir / file_name}: tensor {name} is missing; {INDEX} lists it there")
        return where

    def _open(self, path: Path) -> _File:
        try:
            # safe_open checks the header and the length; of a named pipe it would wait for the other end
            with open_regular_file(path) as stream, safe_open(path, framework="pt"):
                memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            begin = 8 + int.from_bytes(memory[:8], "little")
            tensors = json.loads(memory[8:begin])
            tensors.pop("__metadata__", None)
            self._files[path] = _File(memory, begin, tensors)
        except FileNotFoundError:
            what = what_it_is(self.model_dir) or f"{self.model_dir} holds no weights"
            raise ModelError(f"{path} does not exist: {what}; expected safetensors") from None
        except (SafetensorError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ModelError(f"{path} is not a whole safetensors file ({why:.200}); copy it again") from None
        return self._files[path]


def _by_layer(name: str) -> tuple[bool, list[int], str]:
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return not numbers, numbers, name
