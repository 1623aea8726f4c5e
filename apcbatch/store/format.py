"""Format: the constants of the store's files, and the header of a snapshot file.

docs/reference/store-format.md specifies the bytes.

Invariants:
- A header has exactly one encoding: bytes that parse as a header are those that `encode` writes for it.
- Every length is checked against a bound before memory is allocated for it.
- Every fault of a file raises BadSnapshot with a clause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from apcbatch.layout import Layout, holds_tokens
from apcbatch.store.environment import Reader

FORMAT_VERSION = 1
FORMAT_NAME = f"apcbatch snapshot {FORMAT_VERSION}"

STORE_ID_NAME = "apcbatch-store"
STORE_ID = f"apcbatch snapshot store {FORMAT_VERSION}\n".encode()
INDEX_NAME = "index.sqlite"
INDEX_COMPANIONS = ("-wal", "-shm", "-journal")
ASIDE_SUFFIX = ".damaged"
SUSPECT_NAME = "index.suspect"
OBJECTS_FOLDER = "objects"
TEMPORARY_FOLDER = "tmp"
LOCK_NAME = "store.lock"
OBJECT_SUFFIX = ".safetensors"

KEY_BYTES = 32
MAX_FINGERPRINT_BYTES = 64
MAX_HEADER_BYTES = 16 * 1024
MAX_FILE_BYTES = 1 << 36
MAX_POSITION = 1 << 40
MAX_USES = 1 << 53
MAX_PRIORITY = 1e30
MAX_TENSORS = 16
MAX_DIMENSIONS = 8
MAX_NAME_LENGTH = 32
HEADER_ALIGNMENT_BYTES = 64

DTYPES: dict[str, npt.DTypeLike] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""safetensors dtype -> NumPy dtype. NumPy has no bfloat16, so its bits are held as uint16."""

DTYPE_OF: dict[np.dtype[np.generic], str] = {np.dtype(numpy): name for name, numpy in DTYPES.items()}


Array = npt.NDArray[Any]

_NAME = re.compile(rf"[a-z][a-z0-9_]{{0,{MAX_NAME_LENGTH - 1}}}")
_ZERO_CHECKSUM = "0" * 32
_HEADER_START = b'{"__metadata__":{"checksum":"'
_CHECKSUM = slice(8 + len(_HEADER_START), 8 + len(_HEADER_START) + len(_ZERO_CHECKSUM))
_FIRST_READ_BYTES = 2048


class BadSnapshot(Exception):
    """A snapshot file must not be used. The text is a clause: what was expected, what was found."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Description of one tensor in a file. dtype: safetensors name. checksum: xxh3-128 of its bytes, in hex."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str = _ZERO_CHECKSUM

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a snapshot file.

    position, parent_position: in tokens. parent: key of the parent. Without a parent, parent is None and
    parent_position 0.
    """

    key: bytes
    fingerprint: bytes
    position: int
    parent: bytes | None
    parent_position: int
    tensors: tuple[TensorInfo, ...]

    @property
    def is_chained(self) -> bool:
        """Whether the snapshot can be used only together with its parent."""
        return self.parent is not None and any(holds_tokens(tensor.name) for tensor in self.tensors)

    @property
    def num_data_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def encode(self) -> bytes:
        """Encode the bytes before the first tensor: length, JSON text, and spaces up to the alignment."""
        metadata = {
            "checksum": _ZERO_CHECKSUM,
            "fingerprint": self.fingerprint.hex(),
            "format": FORMAT_NAME,
            "key": self.key.hex(),
            "parent": self.parent.hex() if self.parent else "",
            "parent_position": str(self.parent_position),
            "position": str(self.position),
        } | {f"checksum:{tensor.name}": tensor.checksum for tensor in self.tensors}
        document: dict[str, Any] = {"__metadata__": metadata}
        begin = 0
        for tensor in self.tensors:
            end = begin + tensor.num_bytes
            place = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
            document[tensor.name] = place
            begin = end
        text = orjson.dumps(document)
        text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT_BYTES)
        raw = bytearray(len(text).to_bytes(8, "little") + text)
        raw[_CHECKSUM] = xxhash.xxh3_128_hexdigest(raw).encode()
        return bytes(raw)


def describe(arrays: Mapping[str, Array]) -> tuple[TensorInfo, ...]:
    """Describe arrays in the order of a file, without checksums. Raises ValueError for a dtype that the format
    lacks."""
    for name, array in arrays.items():
        if array.dtype not in DTYPE_OF:
            raise ValueError(f"tensor {name} is {array.dtype}; float32, float16 and uint16 (bfloat16) can be stored")
    return tuple(sorted((TensorInfo(name, DTYPE_OF[one.dtype], one.shape) for name, one in arrays.items()), key=_order))


def tensors_of(layout: Layout, num_tokens: int) -> tuple[TensorInfo, ...]:
    """Describe the tensors of a layout as `describe` does. num_tokens: tokens since the parent."""
    tensors = [
        TensorInfo(name, one.dtype, tuple(num_tokens if size is None else size for size in one.shape))
        for name, one in layout.items()
    ]
    return tuple(sorted(tensors, key=_order))


def _order(tensor: TensorInfo) -> tuple[int, str]:
    """Return the sort key of a file's tensors: widest elements first, then by name."""
    return -np.dtype(DTYPES[tensor.dtype]).itemsize, tensor.name


def make_header(
    key: bytes,
    fingerprint: bytes,
    position: int,
    parent: tuple[bytes, int] | None,
    tensors: Mapping[str, Array] | tuple[TensorInfo, ...],
) -> Header:
    """Make the header of a new snapshot, without checksums.

    parent: (key, position), or None. tensors: the arrays, or descriptions of arrays that come later. Raises ValueError
    for values that the format cannot hold.
    """
    parent_key, parent_position = parent if parent else (None, 0)
    described = tensors if isinstance(tensors, tuple) else describe(tensors)
    header = Header(key, fingerprint, position, parent_key, parent_position, described)
    if problem := _problem(header):
        raise ValueError(problem)
    return header


def read_header(reader: Reader) -> Header:
    """Read and verify the header of a file, and its agreement with the file's length. The tensors are not read."""
    if not _CHECKSUM.stop < reader.size <= MAX_FILE_BYTES:
        raise BadSnapshot(f"{reader.size:,} bytes are not the length of a snapshot file")
    head = _read(reader, 0, min(reader.size, _FIRST_READ_BYTES))
    length = 8 + int.from_bytes(head[:8], "little")
    if not _CHECKSUM.stop < length <= min(8 + MAX_HEADER_BYTES, reader.size):
        raise BadSnapshot(f"its header claims {length - 8:,} bytes, the file has {reader.size:,}")
    head += _read(reader, len(head), length - len(head)) if length > len(head) else b""
    head = head[:length]
    blank = bytearray(head)
    blank[_CHECKSUM] = _ZERO_CHECKSUM.encode()
    if xxhash.xxh3_128_hexdigest(blank).encode() != head[_CHECKSUM]:
        raise BadSnapshot("the checksum of its header does not match")
    header = _parse(head)
    if length + header.num_data_bytes != reader.size:
        raise BadSnapshot(f"its header promises {length + header.num_data_bytes:,} bytes, the file has {reader.size:,}")
    return header


def _read(reader: Reader, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    if reader.read_into(offset, memoryview(buffer)) != length:
        raise BadSnapshot("the file ended while its header was read")
    return bytes(buffer)


def _parse(head: bytes) -> Header:
    """Parse a header, which must encode to exactly these bytes: no other encoding of it is accepted."""
    try:
        document = orjson.loads(head[8:])
        metadata = document.pop("__metadata__")
        if (found := metadata["format"]) != FORMAT_NAME:
            raise BadSnapshot(f"its format is {found!r}, this version reads {FORMAT_NAME!r}")
        tensors = tuple(
            TensorInfo(name, entry["dtype"], tuple(entry["shape"]), metadata[f"checksum:{name}"])
            for name, entry in document.items()
        )
        header = Header(
            key=bytes.fromhex(metadata["key"]),
            fingerprint=bytes.fromhex(metadata["fingerprint"]),
            position=int(metadata["position"]),
            parent=bytes.fromhex(metadata["parent"]) or None,
            parent_position=int(metadata["parent_position"]),
            tensors=tensors,
        )
        problem = _problem(header)
        if problem is None and header.encode() != head:
            problem = "its header is not in the canonical form"
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadSnapshot(f"its header is not that of a snapshot ({type(error).__name__})") from error
    if problem:
        raise BadSnapshot(problem)
    return header


def _problem(header: Header) -> str | None:
    """Return the first fault of a header as a clause; None if it is valid."""
    if len(header.key) != KEY_BYTES or (header.parent is not None and len(header.parent) != KEY_BYTES):
        return f"a key has {KEY_BYTES} bytes"
    if not 1 <= len(header.fingerprint) <= MAX_FINGERPRINT_BYTES:
        return f"a fingerprint has 1 to {MAX_FINGERPRINT_BYTES} bytes, this one {len(header.fingerprint)}"
    if not 0 <= header.parent_position < header.position <= MAX_POSITION:
        return f"position {header.position} does not follow its parent's, {header.parent_position}"
    if (header.parent is None) != (header.parent_position == 0):
        return "a parent has both a key and a position"
    if not 1 <= len(header.tensors) <= MAX_TENSORS:
        return f"a snapshot holds 1 to {MAX_TENSORS} tensors, this one {len(header.tensors)}"
    if problem := next(filter(None, map(_tensor_problem, header.tensors)), None):
        return problem
    order = [_order(tensor) for tensor in header.tensors]
    return None if order == sorted(set(order)) else "its tensors are not in the canonical order"


def _tensor_problem(tensor: TensorInfo) -> str | None:
    if not isinstance(tensor.name, str) or not _NAME.fullmatch(tensor.name):
        return f"a tensor's name is lower-case letters, digits and _, not {tensor.name!r:.40}"
    if not isinstance(tensor.dtype, str) or tensor.dtype not in DTYPES:
        return f"tensor {tensor.name} has the dtype {tensor.dtype!r:.40}; known are {', '.join(DTYPES)}"
    if len(tensor.shape) > MAX_DIMENSIONS:
        return f"tensor {tensor.name} has {len(tensor.shape)} dimensions, the most is {MAX_DIMENSIONS}"
    if any(type(dim) is not int or not 0 <= dim <= MAX_FILE_BYTES for dim in tensor.shape):
        return f"tensor {tensor.name} has an impossible shape"
    return f"tensor {tensor.name} is too large" if tensor.num_bytes > MAX_FILE_BYTES else None
