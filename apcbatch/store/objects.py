"""Objects: the snapshot files of one store folder, named by their keys.

Must not know: the index. A file under its final name is whole, because it was renamed after its last byte was
written. Only plain files in plain folders are read, named and removed: what somebody else has put in their
place (a link, a pipe, a folder) is an OSError where it is read, and stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from apcbatch.layout import Layout, holds_tokens
from apcbatch.store.files import Buffer, Files, not_plain
from apcbatch.store.format import KEY_BYTES, OBJECT_SUFFIX, OBJECTS_FOLDER
from apcbatch.store.header import Array, BadSnapshot, Header, read_header
from apcbatch.store.snapshot_file import StoredSnapshot, check_layout, read_tensors

_NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}}){re.escape(OBJECT_SUFFIX)}")


class Objects:
    """The files below one store's objects folder: objects/a/b/<key in hex>.safetensors.

    256 folders at most: with more of them, most snapshots of a young store would each have to make one first.
    """

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = os.path.join(folder, OBJECTS_FOLDER)
        self._plain_folders: set[str] = set()

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
        path = self._plain_path(key)
        if self._files.exists(path) and self._files.kind(path) != "file":
            raise not_plain(path, "file")
        try:
            self._files.rename(temporary, path)
        except FileNotFoundError:
            self._files.make_folders(os.path.dirname(path))
            self._files.rename(temporary, path)

    def remove(self, key: bytes) -> bool:
        """Remove a snapshot's file; False where there is none that is ours."""
        path = self.path(key)
        return self._is_plain(os.path.dirname(path)) and self._remove(path)

    def remove_namesakes(self, key: bytes) -> int:
        """Remove the files whose names begin with the key's first 8 bytes; returns how many there were. The
        index can have only one of them: the others are what a damaged row has lost sight of."""
        folder = os.path.dirname(self.path(key))
        if not self._is_plain(folder):
            return 0
        paths = [f"{folder}/{name}" for name in self._files.names(folder) if self._is_namesake(name, key)]
        return sum(self._remove(path) for path in paths)

    def discard(self, path: str) -> None:
        """Remove a file that nobody knows of yet, as far as the system lets us."""
        with suppress(OSError):
            self._files.unlink(path)

    def exists(self, key: bytes) -> bool:
        """Whether anything has a snapshot's name, whatever it is."""
        return self._files.exists(self.path(key))

    def header(self, key: bytes) -> Header:
        """The header of a snapshot's file; its tensors are not read.

        Raises BadSnapshot, FileNotFoundError where there is no such file, and OSError where it cannot be
        read.
        """
        with self._files.open(self._plain_path(key)) as reader:
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
        with self._files.open(self._plain_path(key)) as reader:
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
        """The paths of what is not named as snapshots are, or is in none of their folders."""
        for path, name in self._walk():
            key = _key_of(name)
            if key is None or path != self.path(key):
                yield path

    def size(self, key: bytes) -> int:
        return self._files.size(self.path(key))

    def modified(self, key: bytes) -> float:
        return self._files.modified(self.path(key))

    def _plain_path(self, key: bytes) -> str:
        """The path of a snapshot's file; raises OSError where it leads through a link."""
        path = self.path(key)
        if not self._is_plain(os.path.dirname(path)):
            raise not_plain(os.path.dirname(path), "folder")
        return path

    def _is_plain(self, folder: str) -> bool:
        """Whether neither a folder of ours nor one above it is a link; looked at until it is there, and then
        never again."""
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

    def _is_namesake(self, name: str, key: bytes) -> bool:
        found = _key_of(name)
        return found is not None and found[:8] == key[:8]

    def _walk(self) -> Iterator[tuple[str, str]]:
        """(path, name) of everything below the folder, as deep as snapshots are."""
        for first in self._names_in(self._folder):
            path = f"{self._folder}/{first}"
            if self._files.kind(path) != "folder":
                yield path, first
            for second in self._names_in(path):
                leaf = f"{path}/{second}"
                if self._files.kind(leaf) != "folder":
                    yield leaf, second
                for name in self._names_in(leaf):
                    yield f"{leaf}/{name}", name

    def _names_in(self, path: str) -> list[str]:
        return self._files.names(path) if self._files.kind(path) == "folder" else []


def token_names(snapshot: StoredSnapshot) -> list[str]:
    """The tensors of a snapshot that hold the tokens since its parent alone; with one it needs its chain of parents."""
    return [name for name in snapshot.arrays if holds_tokens(name)]


def check_link(child: StoredSnapshot, parent: StoredSnapshot | Header) -> None:
    """Raise BadSnapshot where what a snapshot keeps for each token does not continue its parent's."""
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
