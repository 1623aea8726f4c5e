"""Repair: opens the index of a store that may be written; a damaged one is put aside and made anew.

Must not know: whether the folder is a store, sessions' files. The store's lock must be held. Nothing is lost
with an index but the uses of the snapshots and the names of the models: the rest is in the headers of their
files.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from apcbatch.store.database import IndexDamaged
from apcbatch.store.entry import row_id
from apcbatch.store.files import Files, not_plain
from apcbatch.store.format import ASIDE_SUFFIX, INDEX_COMPANIONS, INDEX_NAME, SUSPECT_NAME
from apcbatch.store.header import BadSnapshot
from apcbatch.store.index import Index
from apcbatch.store.marker import refuse_newer
from apcbatch.store.notices import Notices
from apcbatch.store.objects import Objects

_WRITE_VERSION_AT = 18
_LOG_VERSION = 2


def index_path(files: Files, folder: str) -> str:
    """The path of the index; raises OSError where a link, a pipe or a folder stands in its place, or in that
    of a file that SQLite keeps beside it."""
    path = os.path.join(folder, INDEX_NAME)
    for suffix in ("", *INDEX_COMPANIONS):
        if files.kind(path + suffix) not in (None, "file"):
            raise not_plain(path + suffix, "file")
    return path


@dataclass(frozen=True, slots=True)
class IndexOpener:
    """What opening the index of one store needs. living: the sessions that have it open. thorough: look at
    every value."""

    files: Files
    folder: str
    living: set[str]
    thorough: bool
    notices: Notices

    def open(self) -> Index:
        """The index, looked at as a whole; raises IndexDamaged where it cannot be made anew because other
        processes have it open."""
        suspect = os.path.join(self.folder, SUSPECT_NAME)
        try:
            if self.files.kind(suspect) == "file":
                raise IndexDamaged("the process that used it before found it so")
            return self._attempt("")
        except IndexDamaged as error:
            if self.living:
                raise
            reason = f"the index is damaged ({error}) and was put aside; "
        _put_aside(self.files, index_path(self.files, self.folder))
        index = self._attempt(reason)
        self.files.unlink(suspect)
        return index

    def _attempt(self, reason: str) -> Index:
        """Open the index, or make it from the snapshot files where there is none. reason: why there is none."""
        path = index_path(self.files, self.folder)
        _require_log_version(self.files, path)
        objects = Objects(self.files, self.folder)
        self.files.touch(path)  # SQLite would let everybody read it, and gives its log the same mode
        index = Index(path)
        try:
            if index.is_new():
                index.create(lambda: _fill(index, objects, reason, self.notices))
            else:
                refuse_newer(path, index.version())
                index.use_log()
                index.require_sound(self.thorough)
                _forget_ended_sessions(index, objects, self.living)
        except BaseException:
            index.close()
            raise
        return index


def _put_aside(files: Files, path: str) -> None:
    """Rename the index, with what SQLite keeps beside it; the one put aside before is replaced."""
    aside = path + ASIDE_SUFFIX
    for suffix in ("", *INDEX_COMPANIONS):
        if files.kind(aside + suffix) not in (None, "file"):
            raise not_plain(aside + suffix, "file")
        files.unlink(aside + suffix)
    for suffix in (*INDEX_COMPANIONS, ""):  # the index last: a kill leaves it to be put aside again
        if files.kind(path + suffix) is not None:
            files.rename(path + suffix, aside + suffix)


def _require_log_version(files: Files, path: str) -> None:
    """Raise IndexDamaged where the file's head says that no SQLite may write to it: SQLite calls such a file
    read-only, and that would be taken for a matter of rights."""
    if files.kind(path) is None or files.size(path) <= _WRITE_VERSION_AT:
        return
    with files.open(path) as reader:
        head = bytearray(_WRITE_VERSION_AT + 1)
        reader.read_into(0, memoryview(head))
    if head[_WRITE_VERSION_AT] > _LOG_VERSION:
        raise IndexDamaged("it claims to be of a newer SQLite")


def _fill(index: Index, objects: Objects, reason: str, notices: Notices) -> None:
    """Enter every snapshot file into a new index by its header; the tensors are verified when they are
    read."""
    num_entered = num_unusable = 0
    now, ids = time.time(), set()
    for key in objects.all_keys():
        try:
            header = objects.header(key)
            num_bytes, modified = objects.size(key), objects.modified(key)
        except BadSnapshot:
            objects.remove(key)
            num_unusable += 1
            continue
        except OSError:
            num_unusable += 1
            continue
        if row_id(key) not in ids:
            ids.add(row_id(key))
            model = index.model_id(header.fingerprint, None)
            index.insert(header, num_bytes, model, max(0.0, min(modified, now)))
            num_entered += 1
    if reason or num_entered or num_unusable:
        notices.once(
            "rebuilt",
            f"{reason}a new index was made from the snapshot files: {num_entered} snapshots are in it, "
            f"{num_unusable} could not be used",
        )


def _forget_ended_sessions(index: Index, objects: Objects, living: set[str]) -> None:
    """Take back what killed processes were about to publish: their files have no row, and nobody would count
    them."""
    with index.transaction():
        for session, key in index.reserved_keys():
            if session not in living:
                if index.find(key) is None:
                    objects.remove(key)
                index.release(session)
