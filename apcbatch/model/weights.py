"""Load the tensors of a checkpoint, by the names of its family, onto their devices.

Invariants: every tensor that is not ignored is taken exactly once, and its shape is checked; a missing, surplus or
mis-shaped tensor is an error that names the tensor and its file. The digest is of the bytes that were read into the
tensors' memory, which are read once.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import RLock
from typing import cast

import torch
import xxhash

from apcbatch.errors import ModelError
from apcbatch.kernels.encoded_rows import EncodedRows
from apcbatch.model.adapter import Adapter
from apcbatch.model.decoding import BadPart, check_parts, codes_of, decode
from apcbatch.model.encoded import Encoded, Keeping, check_floating, weights_of
from apcbatch.model.prefetch import Ahead
from apcbatch.model.quantization import CODEC_VERSION
from apcbatch.model.weight_files import FLOATING, StoredTensor, WeightFiles

MOST_THREADS = 8  # threads that read weights for a device
AHEAD_BYTES = 1 << 30
AHEAD_SHARE = 32  # on the CPU, a 32nd of the weights is read ahead at most
LEAST_BUFFER_BYTES = 1 << 16
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
}


class Buffers:
    """Memory for the tensors that are read. The memory of a freed tensor is reused for the next one of its size, as new
    pages take twice the time to fill. most_bytes: limit of the unused memory that is kept; 0 after `close`."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._unused: dict[int, list[mmap.mmap]] = {}
        self._unused_bytes = 0
        self._lock = RLock()  # a tensor may end inside the lock

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the host whose values are not set."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < LEAST_BUFFER_BYTES:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            unused = self._unused.get(num_bytes)
            memory = unused.pop() if unused else None
            self._unused_bytes -= num_bytes if memory else 0
        if memory is None:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(memory)  # lives as long as the tensor's storage
        weakref.finalize(view, self._give_back, memory).atexit = False
        return torch.frombuffer(view, dtype=dtype).view(shape)

    def close(self) -> None:
        """Free the unused memory."""
        with self._lock:
            self.most_bytes = self._unused_bytes = 0
            self._unused.clear()

    def _give_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            if self._unused_bytes + len(memory) <= self.most_bytes:
                self._unused_bytes += len(memory)
                self._unused.setdefault(len(memory), []).append(memory)


class Checkpoint:
    """Tensors of one model folder by name, each loaded onto one device, and the digest of all tensors taken.

    former_names: older name of a tensor in some files -> its name here. prefixes: prefix of tensor names in some files,
    such as multimodal ones -> the prefix here. Neither changes the digest. ignored: prefixes of the names, as in the
    files, of tensors that are not used. Errors use the names in the files. keeping: which weights stay encoded; None:
    none of them. adapter: what is merged into the tensors, and is part of the digest. files: those of the folder, if
    they are open; they are closed with the checkpoint.

    weights: descriptions of all tensors, by their names here. device_of: tensor name -> device; at first `device` for
    all. It and keeping may be set until the first tensor is taken.
    """

    def __init__(
        self,
        model_dir: Path,
        device: torch.device,
        former_names: Mapping[str, str] = {},
        prefixes: Mapping[str, str] = {},
        ignored: tuple[str, ...] = (),
        keeping: Keeping | None = None,
        adapter: Adapter | None = None,
        files: WeightFiles | None = None,
    ) -> None:
        self.keeping = keeping
        self._device, self.device_of = device, cast(Callable[[str], torch.device], lambda name: device)
        self.model_dir = model_dir
        self.files = files or WeightFiles(model_dir)
        self._buffers = Buffers()
        try:
            self.weights = weights_of(self.files, ignored)
        except BaseException:
            self.files.close()
            raise
        self._stored_names: dict[str, str] = {}  # name here -> name in the file
        self._prefix = ("", "")  # beginning of names here, and in the files
        self._rename(former_names, prefixes)
        self._adapter = adapter
        if adapter is not None:
            adapter.bind({name: stored.shape for name, stored in self.weights.items()})
        self._digests: dict[str, bytes] = {}
        self._ahead: Ahead[tuple[torch.Tensor, bytes]] | None = None  # made when the first tensor is taken

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._buffers.close()
        self.files.close()

    def __contains__(self, name: str) -> bool:
        return name in self.weights

    def require(self, name: str, shape: tuple[int, ...]) -> StoredTensor | Encoded:
        """Return the description of the tensor `name`. Raises ModelError unless its header gives exactly `shape` and a
        floating-point dtype."""
        found = self.weights.get(name)
        if found is None:
            raise ModelError(
                f"{self.model_dir}: tensor {self._shown(name)} is missing; expected one of shape {list(shape)}"
            )
        check_floating(found.path, self._shown(name), found.dtype)  # first, as packed weights have another shape too
        if found.shape != shape:
            transposed = len(shape) == 3 and found.shape == (shape[0], shape[2], shape[1])
            raise ModelError(
                f"{found.path}: tensor {self._shown(name)} has shape {list(found.shape)}; expected {list(shape)} by "
                "config.json"
                + "; convolutions are transposed by MLX: give the checkpoint that was converted to MLX"
                * transposed
            )
        return found

    def check_dtypes(self) -> None:
        """Raise ModelError for the first tensor, by name, with a quantised or unknown dtype. Reads headers only."""
        for name in sorted(name for name, found in self.weights.items() if found.dtype not in FLOATING):
            check_floating(self.weights[name].path, self._shown(name), self.weights[name].dtype)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each floating-point tensor by name, in the order of the layers; tensors outside the
        layers come last."""
        return {
            name: self.weights[name].num_bytes
            for name in sorted(self.weights, key=_by_layer)
            if self.weights[name].dtype in FLOATING
        }

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`, which must have exactly `shape`, in the file's floating-point dtype, or decoded to
        bfloat16. An infinite number becomes NaN, which propagates, so that a damaged weight never gives a plausible
        answer. A weight that stays encoded is EncodedRows, which has the operations of a tensor that join rows."""
        self.require(name, shape)
        if self._ahead is None:
            self._ahead = self._read_ahead()
        tensor, self._digests[name] = self._ahead.take(name)
        return tensor

    def _read_ahead(self) -> Ahead[tuple[torch.Tensor, bytes]]:
        """Return a prefetcher that reads the tensors, digests them and moves them to their devices."""
        sizes, on_host = self.sizes(), self._device.type == "cpu"
        threads = 1 if on_host else min(MOST_THREADS, os.cpu_count() or 1)
        most_bytes = min(AHEAD_BYTES, sum(sizes.values()) // AHEAD_SHARE) if on_host else AHEAD_BYTES
        devices = {self.device_of(name) for name in sizes}
        streams = {device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"}
        self._buffers.most_bytes = most_bytes
        return Ahead(partial(self._read, streams), sizes, threads=threads, most_bytes=most_bytes)

    def _read(self, streams: Mapping[torch.device, torch.cuda.Stream], name: str) -> tuple[torch.Tensor, bytes]:
        """Return a tensor on its device, with infinities replaced by NaN, and the digest of its bytes in the file.
        streams: stream of each CUDA device that uses the tensor, so that its memory is not reused too early."""
        stored, device = self.weights[name], self.device_of(name)
        with torch.cuda.stream(streams[device]) if device in streams else nullcontext():
            if isinstance(stored, Encoded):
                rows, digest = self._decoded(name, stored, device)
                if isinstance(rows, EncodedRows):
                    return cast(torch.Tensor, rows), digest
                tensor = rows
            else:
                tensor, digest = self._read_bytes(name, stored)
            tensor = tensor.to(device)
            tensor = tensor if self._adapter is None else self._adapter.merged(name, tensor)
            low, high = tensor.aminmax()  # NaN if any number is
            if not (high - low).isfinite():  # or the difference is too large, and nothing is replaced
                tensor = tensor.where(tensor.isfinite(), math.nan)
        return tensor, digest

    def _read_bytes(self, name: str, stored: StoredTensor) -> tuple[torch.Tensor, bytes]:
        """Return a tensor on the host as it is stored, and the digest of its bytes and its name."""
        tensor = self._buffers.tensor(stored.shape, _DTYPES[stored.dtype])
        label = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        return tensor, self.files.read_into(stored, content) + label

    def _decoded(self, name: str, weight: Encoded, device: torch.device) -> tuple[torch.Tensor | EncodedRows, bytes]:
        """Return a weight on its device, decoded or, if it is kept so, encoded, and the digest of its stored bytes, its
        name and its codec. Raises ModelError for scales that are not finite, and for groups that do not exist."""
        codec, shape = weight.codec, weight.shape
        digest = f"{codec} {CODEC_VERSION} {list(shape)}".encode()
        parts: dict[str, torch.Tensor] = {}
        try:
            for role, (_, stored) in sorted(weight.parts.items(), key=lambda part: part[0] == "codes"):  # large, last
                if role == "codes":
                    check_parts(codec, shape, parts)
                tensor, read = self._read_bytes(f"{name} {role}", stored)
                parts[role], digest = tensor.to(device), digest + read
        except BadPart as bad:
            part, stored = weight.parts[bad.role]
            raise ModelError(
                f"{stored.path}: tensor {part:.120} {bad} of tensor {weight.parts['codes'][0]:.120}"
            ) from None
        kept = weight.kept_as if self.keeping is not None and self.keeping.keeps(name, weight) else None
        if kept is not None:
            codes = codes_of(codec, shape, kept, parts)
            if codes is not None:
                return EncodedRows.of(codes, *shape[:-1]), digest
        if device.type == "cpu":
            out = self._buffers.tensor(shape, torch.bfloat16)
        else:
            out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        decode(codec, parts, out)
        return out, digest

    def finish(self) -> bytes:
        """Return the digest of all tensors by name, independent of their files. Raises ModelError if a tensor was never
        taken, or a file changed since it was opened."""
        surplus = sorted(set(self.weights) - set(self._digests))
        if surplus:
            more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
            raise ModelError(
                f"{self.weights[surplus[0]].path}: tensor {self._shown(surplus[0])!r:.120}{more} is not part of this "
                "architecture; check architectures and the layer sizes in config.json"
            )
        self.files.check_unchanged()
        digest = xxhash.xxh3_128()
        for name in sorted(self._digests):
            digest.update(self._digests[name])
        digest.update(b"" if self._adapter is None else self._adapter.digest.encode())
        return digest.digest()

    def _rename(self, former_names: Mapping[str, str], prefixes: Mapping[str, str]) -> None:
        """Rename tensors that have older names or another prefix in the files."""
        renamed = {theirs: ours for theirs, ours in former_names.items() if theirs in self.weights}
        for theirs, ours in prefixes.items():
            names = [name for name in self.weights if name.startswith(theirs)]
            if names:
                self._prefix = ours, theirs
                renamed.update((name, ours + name.removeprefix(theirs)) for name in names)
        for theirs, ours in renamed.items():
            if ours not in self.weights:
                self.weights[ours] = self.weights.pop(theirs)
                self._stored_names[ours] = theirs

    def _shown(self, name: str) -> str:
        """Return a tensor's name in the files; for a missing tensor, the name expected there."""
        if name in self.weights:
            return self._stored_names.get(name, name)
        ours, theirs = self._prefix
        return theirs + name.removeprefix(ours) if name.startswith(ours) else name


def _by_layer(name: str) -> tuple[bool, list[int], str]:
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return not numbers, numbers, name
