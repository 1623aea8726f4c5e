"""The safetensors files of a checkpoint, single or sharded with an index: what each tensor is, and its bytes.

Invariants: only regular files with plain names in the folder are opened, each once, and its header and its tensors are
read from that descriptor. Nothing is mapped, so a file that changes later changes nothing in memory, and one that is
cut is an error and not a signal. Headers have bounded sizes. Importing this module does not load torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from apcbatch.data.model_files import read_model_json
from apcbatch.display import visible
from apcbatch.errors import ModelError
from apcbatch.model.locate import what_it_is
from apcbatch.regular_files import identity, open_regular_file

# The dtypes that weights may have: safetensors' name -> bytes of an element.
FLOATING: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_ITEM_BYTES = {**FLOATING, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}  # that are read
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}\.safetensors")
MOST_HEADER_BYTES = 32 << 20  # of all files of a checkpoint together
MOST_HEADER_VALUES = 3 << 20  # of all these headers together: 12 for each of 262,144 tensors
MOST_DIMENSIONS = 8
_MOST_NAME_CHARACTERS = 512
_MOST_DTYPE_CHARACTERS = 16
_KEYS = {"dtype", "shape", "data_offsets"}
_PIECE_BYTES = 1 << 20  # read, then digested while they are in the processor's cache


class StoredTensor(NamedTuple):
    """A tensor in a file. dtype: safetensors name. offset: of its first byte in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _File(NamedTuple):
    """An open file of weights. identity: see regular_files, when it was opened."""

    file: BinaryIO
    identity: tuple[int, ...] | None


class WeightFiles:
    """The files of weights in one model folder, open until `close`. tensors: all of their tensors by name. Raises
    ModelError if a file is missing, damaged or not safetensors. name: of the only file to read, such as that of an
    adapter; None: the model's."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder, self._name = folder, name
        self.tensors: dict[str, StoredTensor] = {}
        self._files: dict[Path, _File] = {}
        self._header_bytes = self._header_values = 0
        try:
            self._locate()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for opened in self._files.values():
            opened.file.close()

    def read_into(self, tensor: StoredTensor, target: memoryview) -> bytes:
        """Fill `target`, bytes, with a tensor's bytes, and return their xxh3-128 digest. Raises ModelError if the file
        has become shorter or cannot be read."""
        descriptor, digest, done = self._files[tensor.path].file.fileno(), xxhash.xxh3_128(), 0
        while done < tensor.num_bytes:
            piece = target[done : done + _PIECE_BYTES]
            try:
                count = os.preadv(descriptor, [piece], tensor.offset + done)
            except OSError as error:
                raise _unreadable(tensor.path, error) from None
            if not count:
                raise _changed(tensor.path)
            digest.update(piece[:count])
            done += count
        return digest.digest()

    def check_unchanged(self) -> None:
        """Raise ModelError if a name in the folder now stands for another file than the one that was opened, or for one
        that was written to since."""
        for path, opened in self._files.items():
            if identity(path) != opened.identity:
                raise _changed(path)

    def _locate(self) -> None:
        """Open all files and read their headers."""
        index = self.folder / INDEX
        if self._name is not None or not os.path.exists(index):
            self._open(self.folder / (self._name or SINGLE))
            return
        weight_map = read_model_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ModelError(f"{index}: weight_map is missing; expected an object of tensor names and file names")
        file_names = sorted(set(weight_map.values()))
        for file_name in file_names:
            if not _PLAIN_NAME.fullmatch(file_name):
                raise ModelError(
                    f"{index}: weight_map names {reprlib.repr(file_name)}; expected plain file names such as "
                    "model-00001-of-00002.safetensors"
                )
        missing = [name for name in file_names if not (self.folder / name).exists()]
        if missing:
            raise ModelError(
                f"{self.folder} lacks {len(missing)} of the {len(file_names)} files of weights that {INDEX} names: "
                f"{', '.join(missing[:3])}{', ..' * (len(missing) > 3)}; download the model again"
            )
        for file_name in file_names:
            self._open(self.folder / file_name)
        for name, file_name in weight_map.items():
            if name not in self.tensors or self.tensors[name].path.name != file_name:
                raise ModelError(
                    f"{self.folder / file_name}: tensor {visible(name[:120])} is missing; {INDEX} lists it there"
                )

    def _open(self, path: Path) -> None:
        """Open a file and add its tensors."""
        try:
            file = open_regular_file(path)
            opened = self._files[path] = _File(file, identity(file.fileno()))
            tensors = self._read_header(path, opened)
        except FileNotFoundError:
            named = min((one.name for one in self.folder.glob("*.safetensors")), default=None)
            held = "no weights" if named is None else f"{visible(named)}, and no {INDEX}"
            what = what_it_is(self.folder) or f"{self.folder} holds {held}"
            raise ModelError(f"{path} does not exist: {what}; expected safetensors") from None
        except OSError as error:
            raise _unreadable(path, error) from None
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise ModelError(f"{path} is not a whole safetensors file ({why:.200}); copy it again") from None
        if (name := next(filter(self.tensors.__contains__, tensors), None)) is not None:
            raise ModelError(
                f"tensor {name:.120} stands in {self.tensors[name].path} and in {path}; expected each tensor in one "
                "file: download the model again into an empty folder"
            )
        self.tensors |= tensors

    def _read_header(self, path: Path, opened: _File) -> dict[str, StoredTensor]:
        """Return the tensors of a file by name. Raises ValueError, with a clause, unless they fill the file from its
        header to its end."""
        file, size = opened.file, os.fstat(opened.file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"its header should have {length:,} bytes, the file has {size:,}")
        self._header_bytes += length
        if self._header_bytes > MOST_HEADER_BYTES:
            raise ValueError(
                f"the headers of the weights have {self._header_bytes:,} bytes, the most is {MOST_HEADER_BYTES:,}"
            )
        raw = file.read(length)
        self._header_values += sum(map(raw.count, (b"{", b"[", b",")))
        if self._header_values > MOST_HEADER_VALUES:
            raise ValueError(
                f"the headers of the weights have {self._header_values:,} values, the most is {MOST_HEADER_VALUES:,}"
            )
        begin = end = 8 + length
        tensors = json.loads(raw.decode(), object_pairs_hook=partial(_compact, path, begin))
        if not isinstance(tensors, dict):
            raise ValueError("its header is no object")
        tensors.pop("__metadata__", None)
        for name, tensor in tensors.items():
            if len(name) > _MOST_NAME_CHARACTERS or not name.isprintable():
                raise ValueError(
                    f"its header has the name {reprlib.repr(name)}; expected at most {_MOST_NAME_CHARACTERS} "
                    "printable characters"
                )
            if not isinstance(tensor, StoredTensor):
                raise ValueError(f"its header says of {name:.80} no dtype, shape and data_offsets")
            expected = math.prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 0)
            if tensor.num_bytes != expected and tensor.dtype in _ITEM_BYTES:
                raise ValueError(f"its header gives {name:.80} {tensor.num_bytes:,} bytes, not {expected:,}")
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1][3:]):
            if tensor.offset != end:
                at = f"at byte {tensor.offset - begin:,} of the data, expected at {end - begin:,}"
                raise ValueError(f"its header has {name:.80} {at}")
            end += tensor.num_bytes
        if end != size:
            raise ValueError(f"its header promises {end:,} bytes, the file has {size:,}")
        return tensors


def weights_if_there(folder: Path) -> WeightFiles | nullcontext[None]:
    """Open the weights of a folder; a context of None if they are not there, or cannot be read."""
    try:
        return WeightFiles(folder)
    except ModelError:
        return nullcontext()


def ignored_tensors(files: WeightFiles, prefixes: tuple[str, ...]) -> str | None:
    """Return a sentence about the tensors whose names begin with one of the prefixes; None if there are none."""
    counts = {prefix: sum(name.startswith(prefix) for name in files.tensors) for prefix in prefixes}
    parts = ", ".join(f"{count} of {prefix}*" for prefix, count in counts.items() if count)
    ignored = f"{sum(counts.values())} tensors are ignored, of parts that are not run ({parts})"
    return f"{files.folder}: {ignored}" if parts else None


def _compact(path: Path, data: int, pairs: list[tuple[str, Any]]) -> dict[str, Any] | StoredTensor:
    """Return an object of a header: a StoredTensor if it describes a tensor, otherwise a dict. data: where the tensors'
    bytes begin in the file. Raises ValueError for a name that stands in it twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name stands twice in its header")
    if values.keys() != _KEYS:
        return values
    dtype, shape, offsets = values["dtype"], values["shape"], values["data_offsets"]
    if type(dtype) is str and type(shape) is list and type(offsets) is list and len(offsets) == 2:
        begin, end = offsets
        is_tensor = len(dtype) <= _MOST_DTYPE_CHARACTERS and dtype.isprintable() and len(shape) <= MOST_DIMENSIONS
        is_tensor = is_tensor and type(begin) is int and type(end) is int and 0 <= begin <= end
        if is_tensor and all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
            return StoredTensor(path, sys.intern(dtype), tuple(shape), data + begin, end - begin)
    return values


def _changed(path: Path) -> ModelError:
    return ModelError(f"{path} changed while it was read; run again once nothing writes to it")


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path} cannot be read ({error.strerror}); expected a file of weights")
