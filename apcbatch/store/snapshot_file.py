"""SnapshotFile: one snapshot as the bytes of one safetensors file, and back.

Must not know: the index, folders, which model it is. docs/store-format.md has the byte format.
Invariants: the same snapshot always gives the same bytes; every byte of a file is covered by a checksum; no
tensor is handed out before its checksum was verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash

from apcbatch.layout import Layout
from apcbatch.store.files import Buffer, Reader
from apcbatch.store.format import DTYPES
from apcbatch.store.header import Array, BadSnapshot, Header, read_header


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A verified snapshot. arrays: name -> array (bfloat16 as its bits in uint16) in memory of its own,
    or in what the reader was given to read into."""

    key: bytes
    position: int
    parent: bytes | None
    parent_position: int
    arrays: dict[str, Array]


def encode(header: Header, arrays: Mapping[str, Array]) -> tuple[Header, list[Buffer]]:
    """The header with its checksums, and the file as a list of buffers to be written one after the other.

    The buffers point into contiguous arrays; others are copied.
    """
    tensors, chunks = [], []
    for tensor in header.tensors:
        data = np.ascontiguousarray(arrays[tensor.name]).reshape(-1).view(np.uint8).data
        tensors.append(replace(tensor, checksum=xxhash.xxh3_128_hexdigest(data)))
        chunks.append(data)
    header = replace(header, tensors=tuple(tensors))
    return header, [header.encode(), *chunks]


def read_tensors(
    reader: Reader,
    header: Header,
    names: Sequence[str] | None = None,
    into: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """The named tensors (all of them by default), each verified against its checksum, from a file just
    checked.

    into: contiguous arrays that tensors of their name and size are read into; others get new memory.
    """
    arrays: dict[str, Array] = {}
    offset = reader.size - header.num_data_bytes
    for tensor in header.tensors:
        if names is None or tensor.name in names:
            data = _bytes_of(into.get(tensor.name) if into else None, tensor.num_bytes)
            if reader.read_into(offset, data.data) != tensor.num_bytes:
                raise BadSnapshot(f"the file ended while tensor {tensor.name} was read")
            if xxhash.xxh3_128_hexdigest(data.data) != tensor.checksum:
                raise BadSnapshot(f"the checksum of tensor {tensor.name} does not match its bytes")
            arrays[tensor.name] = data.view(DTYPES[tensor.dtype]).reshape(tensor.shape)
        offset += tensor.num_bytes
    return arrays


class _Bytes:
    """A file's bytes in memory, as a Reader."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")

    @property
    def size(self) -> int:
        return len(self._data)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        piece = self._data[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)


def decode(data: Buffer, key: bytes, position: int, fingerprint: bytes, layout: Layout) -> StoredSnapshot:
    """The verified snapshot of a file's bytes, in memory of its own; it must need no parent.

    BadSnapshot says what is wrong with the bytes, or whose they are if not these.
    """
    reader = _Bytes(data)
    header = read_header(reader)
    if header.key != key or header.position != position:
        raise BadSnapshot(f"it holds the snapshot {header.key.hex()} at {header.position}")
    if header.fingerprint != fingerprint:
        raise BadSnapshot("it belongs to a model with another fingerprint")
    if header.parent is not None:
        raise BadSnapshot(f"it continues a snapshot at {header.parent_position}; expected one that is whole")
    check_layout(header, layout)
    return StoredSnapshot(key, position, None, 0, read_tensors(reader, header))


def _bytes_of(array: Array | None, num_bytes: int) -> npt.NDArray[np.uint8]:
    """The array's own bytes; new memory where there is none of that size."""
    if array is None or array.nbytes != num_bytes or not array.flags.c_contiguous:
        return np.empty(num_bytes, dtype=np.uint8)
    return array.reshape(-1).view(np.uint8)


def check_layout(header: Header, layout: Layout) -> None:
    """Raise BadSnapshot where the tensors are not exactly those that the model's snapshots hold."""
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    tokens = header.position - header.parent_position
    expected = {
        name: (tensor.dtype, tuple(tokens if dim is None else dim for dim in tensor.shape))
        for name, tensor in layout.items()
    }
    if found != expected:
        raise BadSnapshot(f"the model's snapshots hold {_in_words(expected)}, this one {_in_words(found)}")


def _in_words(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in sorted(tensors.items()))
