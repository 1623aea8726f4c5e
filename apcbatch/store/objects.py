"""Objects: the snapshot files of one store folder, named by their keys.

Must not know: the index. A file under its final name is whole, because it was renamed after its last byte was
written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from apcbatch.store.files import Buffer, Files
from apcbatch.store.format import KEY_BYTES, KV, OBJECT_SUFFIX, OBJECTS_FOLDER
from apcbatch.store.header import Array, BadSnapshot, Header, read_header
from apcbatch.store.snapshot_file import Layout, StoredSnapshot, check_layout, read_tensors


class Objects:
    """The files below one store's objects folder: objects/a/b/<key in hex>.safetensors.

    256 folders at most: with more of them, most snapshots of a young store would each have to make one first.
    """

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = os.path.join(folder, OBJECTS_FOLDER)

    def path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[0]}/{name[1]}/{name}{OBJECT_SUFFIX}"

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        """Write a temporary file; nothing of it is left where that fails."""
        try:
            self._files.write(path, chunks)
        except OSError:
            self.discard(path)
            raise

    def publish(self, temporary: str, key: bytes) -> None:
        """Give a whole temporary file the name of its key."""
        path = self.path(key)
        try:
            self._files.rename(temporary, path)
        except FileNotFoundError:
            self._files.make_folders(os.path.dirname(path))
            self._files.rename(temporary, path)

    def remove(self, key: bytes) -> bool:
        """Remove a snapshot's file; False where there was none."""
        return self._files.unlink(self.path(key))

    def discard(self, path: str) -> None:
        """Remove a file that nobody knows of yet, as far as the system lets us."""
        with suppress(OSError):
            self._files.unlink(path)

    def exists(self, key: bytes) -> bool:
        return self._files.exists(self.path(key))

    def header(self, key: bytes) -> Header:
        """The header of a snapshot's file; its tensors are not read.

        Raises BadSnapshot, FileNotFoundError where there is no such file, and OSError where it cannot be
        read.
        """
        with self._files.open(self.path(key)) as reader:
            header = read_header(reader)
        _check_key(header, key)
        return header

    def read(
        self,
        key: bytes,
        fingerprint: bytes | None = None,
        layouts: Mapping[bytes, Layout] | None = None,
        names: Sequence[str] | None = None,
        into: Mapping[str, Array] | None = None,
    ) -> StoredSnapshot:
        """The snapshot, or only the named tensors of it; the layout is checked before memory is taken for
        them. into: as in read_tensors.

        Raises BadSnapshot, FileNotFoundError where there is no such file, and OSError where it cannot be
        read.
        """
        with self._files.open(self.path(key)) as reader:
            header = read_header(reader)
            _check_key(header, key)
            if fingerprint is not None and header.fingerprint != fingerprint:
                raise BadSnapshot("it belongs to a model with another fingerprint")
            layout = layouts.get(header.fingerprint) if layouts else None
            if layout is not None:
                check_layout(header, layout)
            arrays = read_tensors(reader, header, names, into)
        return StoredSnapshot(key, header.position, header.parent, header.parent_position, arrays)

    def all_keys(self) -> Iterator[bytes]:
        """The keys of all files, ascending; names that are not a key's are passed over (see strangers)."""
        for path, name in self._walk():
            key = _key_of(name)
            if key is not None and path == self.path(key):
                yield key

    def strangers(self) -> Iterator[str]:
        """The paths of files that are not named as snapshots are."""
        for path, name in self._walk():
            key = _key_of(name)
            if key is None or path != self.path(key):
                yield path

    def size(self, key: bytes) -> int:
        return self._files.size(self.path(key))

    def modified(self, key: bytes) -> float:
        return self._files.modified(self.path(key))

    def _walk(self) -> Iterator[tuple[str, str]]:
        for first in self._files.names(self._folder):
            for second in self._names_in(f"{self._folder}/{first}"):
                for name in self._names_in(f"{self._folder}/{first}/{second}"):
                    yield f"{self._folder}/{first}/{second}/{name}", name

    def _names_in(self, path: str) -> list[str]:
        return self._files.names(path) if self._files.is_folder(path) else []


def check_link(child: StoredSnapshot, parent: StoredSnapshot | Header) -> None:
    """Raise BadSnapshot where a snapshot with KV does not continue its parent's."""
    if parent.position != child.parent_position:
        raise BadSnapshot(f"its parent is at {parent.position}, it continues {child.parent_position}")
    tensors = parent.arrays if isinstance(parent, StoredSnapshot) else {info.name for info in parent.tensors}
    if KV not in tensors:
        raise BadSnapshot("its parent has no kv")


def _check_key(header: Header, key: bytes) -> None:
    if header.key != key:
        raise BadSnapshot(f"it holds the snapshot {header.key.hex()}")


def _key_of(name: str) -> bytes | None:
    stem, suffix = os.path.splitext(name)
    try:
        key = bytes.fromhex(stem)
    except ValueError:
        return None
    return key if suffix == OBJECT_SUFFIX and len(key) == KEY_BYTES else None
