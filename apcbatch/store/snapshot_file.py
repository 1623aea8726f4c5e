"""Snapshot files: a snapshot as the bytes of one safetensors file, and the folder of these files.

docs/reference/store-format.md specifies the bytes.

Invariants:
- The same snapshot always gives the same bytes.
- Every byte of a file is covered by a checksum.
- No tensor is returned before its checksum is verified.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash

from apcbatch.layout import Layout, holds_tokens
from apcbatch.store.environment import Buffer, Files, Reader, not_plain
from apcbatch.store.format import (
    DTYPES,
    KEY_BYTES,
    OBJECT_SUFFIX,
    OBJECTS_FOLDER,
    Array,
    BadSnapshot,
    Header,
    read_header,
    tensors_of,
)


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A verified snapshot.

    position, parent_position: in tokens. parent: key of the parent, or None. arrays: name -> array, bfloat16 as its
    bits in uint16; in new memory, or in the arrays given to read into.
    """

    key: bytes
    position: int
    parent: bytes | None
    parent_position: int
    arrays: dict[str, Array]


def encode(header: Header, arrays: Mapping[str, Array]) -> tuple[Header, list[Buffer]]:
    """Encode a snapshot. Return the header with its checksums, and the file as buffers to write in this order.

    The buffers of contiguous arrays point into the arrays; other arrays are copied.
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
    """Read the tensors of these names (None: all), each verified against its checksum. header: verified header of the
    file.

    into: arrays to read into, by name. An array that has another size or is not contiguous is not used: its tensor gets
    new memory.
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
    """A Reader over bytes in memory."""

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
    """Decode and verify a snapshot from the bytes of a file, into new memory. It must have no parent.

    Raises BadSnapshot for damaged bytes, and for those of another snapshot.
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
    """Return the bytes of an array, or new memory if the array is None, not contiguous or of another size."""
    if array is None or array.nbytes != num_bytes or not array.flags.c_contiguous:
        return np.empty(num_bytes, dtype=np.uint8)
    return array.reshape(-1).view(np.uint8)


def check_layout(header: Header, layout: Layout) -> None:
    """Raise BadSnapshot unless the tensors are exactly those of the layout."""
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    own = tensors_of(layout, header.position - header.parent_position)
    expected = {tensor.name: (tensor.dtype, tensor.shape) for tensor in own}
    if found != expected:
        raise BadSnapshot(f"the model's snapshots hold {_in_words(expected)}, this one {_in_words(found)}")


def _in_words(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Describe tensors in an error message."""
    return ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in sorted(tensors.items()))


_NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}}){re.escape(OBJECT_SUFFIX)}")


class SnapshotFolder:
    """The snapshot files of one store: objects/a/b/<key in hex>.safetensors. layouts: layout of each model, by
    fingerprint.

    a and b are the first two hex digits of the key, which gives 256 folders at most. With more folders, most snapshots
    of a new store would each have to create one first.
    """

    def __init__(self, files: Files, folder: str) -> None:
        self.layouts: dict[bytes, Layout] = {}
        self._files = files
        self._folder = os.path.join(folder, OBJECTS_FOLDER)
        self._plain_folders: set[str] = set()

    def path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[0]}/{name[1]}/{name}{OBJECT_SUFFIX}"

    def write(self, path: str, header: Header, arrays: Mapping[str, Array]) -> Header:
        """Write a temporary file, and return the header with its checksums. If writing fails, the file is removed."""
        header, chunks = encode(header, arrays)
        try:
            self._files.write(path, chunks)
        except OSError:
            self.discard(path)
            raise
        return header

    def publish(self, temporary: str, key: bytes) -> None:
        """Rename a complete temporary file to the name of its key."""
        path = self._plain_path(key)
        if self._files.exists(path) and self._files.kind(path) != "file":
            raise not_plain(path, "file")
        try:
            self._files.rename(temporary, path)
        except FileNotFoundError:
            self._files.make_folders(os.path.dirname(path))
            self._files.rename(temporary, path)

    def remove(self, key: bytes) -> bool:
        """Remove a snapshot's file. Return False if there is none, or a link on its path."""
        path = self.path(key)
        return self._is_plain(os.path.dirname(path)) and self._remove(path)

    def remove_namesakes(self, key: bytes) -> int:
        """Remove the files whose names begin with the key's first 8 bytes, and return their number.

        The index has a row for at most one of them; the others are files whose row was damaged.
        """
        folder = os.path.dirname(self.path(key))
        if not self._is_plain(folder):
            return 0
        keys = map(_key_of, self._files.names(folder))
        return sum(self._remove(self.path(found)) for found in keys if found is not None and found[:8] == key[:8])

    def discard(self, path: str) -> None:
        """Remove a file that is not in the index yet. Errors of the system are ignored."""
        with suppress(OSError):
            self._files.unlink(path)

    def exists(self, key: bytes) -> bool:
        """Return whether anything, file or not, is at a snapshot's path."""
        return self._files.exists(self.path(key))

    def header(self, key: bytes) -> Header:
        """Read the header of a snapshot's file, without its tensors.

        Raises BadSnapshot, FileNotFoundError if there is no such file, and OSError if it cannot be read.
        """
        with self._files.open(self._plain_path(key)) as reader:
            header = read_header(reader)
        _check_key(header, key)
        return header

    def read(
        self,
        key: bytes,
        fingerprint: bytes | None = None,
        names: Sequence[str] | None = None,
        into: Mapping[str, Array] | None = None,
    ) -> StoredSnapshot:
        """Read a snapshot, or only its tensors of these names.

        fingerprint: fingerprint of its model, checked with the registered layout, if any, before memory is allocated;
        None to check neither. into: see read_tensors.

        Raises BadSnapshot, FileNotFoundError if there is no such file, and OSError if it cannot be read.
        """
        with self._files.open(self._plain_path(key)) as reader:
            header = read_header(reader)
            _check_key(header, key)
            if fingerprint is not None:
                if header.fingerprint != fingerprint:
                    raise BadSnapshot("it belongs to a model with another fingerprint")
                if fingerprint in self.layouts:
                    check_layout(header, self.layouts[fingerprint])
            arrays = read_tensors(reader, header, names, into)
        return StoredSnapshot(key, header.position, header.parent, header.parent_position, arrays)

    def all_keys(self) -> Iterator[bytes]:
        """Yield the keys of all files, ascending. Other names are skipped (see strangers)."""
        return (key for path, key in self._walk() if key is not None and path == self.path(key))

    def strangers(self) -> Iterator[str]:
        """Yield the paths of everything without the name and the folder of a snapshot."""
        return (path for path, key in self._walk() if key is None or path != self.path(key))

    def size(self, key: bytes) -> int:
        return self._files.size(self.path(key))

    def modified(self, key: bytes) -> float:
        return self._files.modified(self.path(key))

    def _plain_path(self, key: bytes) -> str:
        """Return the path of a snapshot's file. Raises OSError if one of its folders is a link."""
        path = self.path(key)
        if not self._is_plain(os.path.dirname(path)):
            raise not_plain(os.path.dirname(path), "folder")
        return path

    def _is_plain(self, folder: str) -> bool:
        """Return whether neither the folder nor a parent of it within the store is a link.

        A folder that was found to be plain is not checked again.
        """
        if folder in self._plain_folders:
            return True
        if folder != self._folder and not self._is_plain(os.path.dirname(folder)):
            return False
        kind = self._files.kind(folder)
        if kind == "folder":
            self._plain_folders.add(folder)
        return kind in (None, "folder")

    def _remove(self, path: str) -> bool:
        return self._files.kind(path) == "file" and self._files.unlink(path)

    def _walk(self) -> Iterator[tuple[str, bytes | None]]:
        """Yield (path, key in its name) of everything in the folder, down to the depth of snapshots."""
        for first in self._names_in(self._folder):
            path = f"{self._folder}/{first}"
            if self._files.kind(path) != "folder":
                yield path, _key_of(first)
            for second in self._names_in(path):
                leaf = f"{path}/{second}"
                if self._files.kind(leaf) != "folder":
                    yield leaf, _key_of(second)
                for name in self._names_in(leaf):
                    yield f"{leaf}/{name}", _key_of(name)

    def _names_in(self, path: str) -> list[str]:
        return self._files.names(path) if self._files.kind(path) == "folder" else []


def token_names(snapshot: StoredSnapshot) -> list[str]:
    """Return the names of the incremental tensors (KV since the parent). If any, loading needs the chain of parents."""
    return [name for name in snapshot.arrays if holds_tokens(name)]


def check_link(child: StoredSnapshot, parent: StoredSnapshot | Header) -> None:
    """Raise BadSnapshot unless a snapshot's incremental tensors continue its parent's."""
    if parent.position != child.parent_position:
        raise BadSnapshot(f"its parent is at {parent.position}, it continues {child.parent_position}")
    tensors = parent.arrays if isinstance(parent, StoredSnapshot) else {info.name for info in parent.tensors}
    for name in token_names(child):
        if name not in tensors:
            raise BadSnapshot(f"its parent has no {name}")


def _check_key(header: Header, key: bytes) -> None:
    if header.key != key:
        raise BadSnapshot(f"it holds the snapshot {header.key.hex()}")


def _key_of(name: str) -> bytes | None:
    match = _NAME.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None
