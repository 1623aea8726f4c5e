"""Opening: finds out what can be done with a store folder, and leaves it sound.

Must not know: what is stored in it. A folder that is not a store, and not empty, is refused before anything
in it is changed. A store that cannot be written is read; one whose index is missing or damaged gets a new one
from the headers of its files; where nothing helps, the store is empty for this run. Each costs one line.
Invariant: whoever changes the folder as a whole (a new index, the leftovers of ended sessions) holds the
store's lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from apcbatch.errors import UsageError
from apcbatch.store.database import IndexDamaged, IndexFault, IndexUnavailable
from apcbatch.store.entry import row_id
from apcbatch.store.files import Files, not_plain
from apcbatch.store.format import (
    ASIDE_SUFFIX,
    INDEX_COMPANIONS,
    INDEX_NAME,
    LOCK_NAME,
    OBJECTS_FOLDER,
    SUSPECT_NAME,
    TEMPORARY_FOLDER,
)
from apcbatch.store.header import BadSnapshot
from apcbatch.store.index import Index
from apcbatch.store.marker import identify, put_marker, refuse_newer
from apcbatch.store.notices import Notices
from apcbatch.store.objects import Objects
from apcbatch.store.session import Session, sweep

LOCK_TIMEOUT_S = 60.0
_WRITE_VERSION_AT = 18
_LOG_VERSION = 2


@dataclass(frozen=True, slots=True)
class Opened:
    """reader: None where the store cannot even be read. index and session: None where it cannot be
    written."""

    reader: Index | None
    index: Index | None
    session: Session | None


def open_folder(files: Files, folder: str, read_only: bool, maintenance: bool, notices: Notices) -> Opened:
    """Open a store's index, creating and repairing what is needed. maintenance: there must be a store
    already, and every value of its index is looked at.

    Raises UsageError for a path that is not a folder, a folder that cannot be made or that holds something
    else than a store, and a store of a newer version.
    """
    may_create = not (read_only or maintenance)
    if not files.is_folder(folder):
        _make_folder(files, folder, may_create)
    problem = None
    try:
        _require_store(folder, identify(files, folder), may_create)
    except OSError as error:
        problem = f"it cannot be looked into ({error})"
    if problem is None and not read_only:
        if files.is_writable(folder):
            try:
                return _open_to_write(files, folder, maintenance, notices)
            except (OSError, IndexFault) as error:
                problem = f"it cannot be written ({error})"
        else:
            problem = "the folder is read-only"
    return Opened(_open_to_read(files, folder, problem, notices), None, None)


def _make_folder(files: Files, folder: str, may_create: bool) -> None:
    if files.kind(folder) is not None:
        raise UsageError(f"--store {folder} is not a folder; give a folder, new or of an earlier run")
    if not may_create:
        raise UsageError(f"there is no store at {folder}; give the --store folder of an earlier run")
    try:
        files.make_folders(folder)
    except OSError as error:
        sentence = f"the store folder {folder} cannot be made ({error}); give another --store"
        raise UsageError(sentence) from error


def _require_store(folder: str, found: str, may_create: bool) -> None:
    if found == "other":
        raise UsageError(
            f"{folder} is not a snapshot store and not empty, so nothing in it is touched; give a --store "
            "folder that is new, empty or of an earlier run"
        )
    if found == "empty" and not may_create:
        raise UsageError(f"there is no store at {folder}; give the --store folder of an earlier run")


def _open_to_write(files: Files, folder: str, thorough: bool, notices: Notices) -> Opened:
    put_marker(files, folder)
    for name in (OBJECTS_FOLDER, TEMPORARY_FOLDER):
        path = os.path.join(folder, name)
        if files.kind(path) not in (None, "folder"):
            raise not_plain(path, "folder")
    files.make_folders(os.path.join(folder, OBJECTS_FOLDER))
    lock = files.lock(os.path.join(folder, LOCK_NAME), LOCK_TIMEOUT_S)
    if lock is None:
        raise TimeoutError(f"another process has been opening it for {LOCK_TIMEOUT_S:.0f} s")
    try:
        living, _ = sweep(files, folder)
        objects = Objects(files, folder)
        index = _sound_index(files, folder, objects, bool(living), thorough, notices)
        try:
            forget_ended_sessions(index, objects, living)
            reader = Index(os.path.join(folder, INDEX_NAME), "ro")
            session = Session(files, folder)
        except BaseException:
            index.close()
            raise
        return Opened(reader, index, session)
    finally:
        lock.release()


def _sound_index(
    files: Files, folder: str, objects: Objects, is_in_use: bool, thorough: bool, notices: Notices
) -> Index:
    """The index, looked at as a whole; a damaged one is put aside and made anew unless other processes have
    it open."""
    path = _index_path(files, folder)
    suspect = os.path.join(folder, SUSPECT_NAME)
    try:
        if files.kind(suspect) == "file":
            raise IndexDamaged("the process that used it before found it so")
        return _open_index(files, path, thorough, lambda index: _fill(index, objects, "", notices))
    except IndexDamaged as error:
        if is_in_use:
            raise
        reason = f"the index is damaged ({error}) and was put aside; "
    _put_aside(files, path)
    index = _open_index(files, path, thorough, lambda index: _fill(index, objects, reason, notices))
    files.unlink(suspect)
    return index


def _index_path(files: Files, folder: str) -> str:
    """The path of the index; raises OSError where a link, a pipe or a folder stands in its place, or in that
    of a file that SQLite keeps beside it."""
    path = os.path.join(folder, INDEX_NAME)
    for suffix in ("", *INDEX_COMPANIONS):
        if files.kind(path + suffix) not in (None, "file"):
            raise not_plain(path + suffix, "file")
    return path


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


def _open_index(files: Files, path: str, thorough: bool, fill: Callable[[Index], None]) -> Index:
    """The index; where there is none, one that fill has filled."""
    _require_log_version(files, path)
    index = Index(path)
    try:
        if index.is_new():
            index.create(lambda: fill(index))
        else:
            refuse_newer(path, index.version())
            index.use_log()
            index.require_sound(thorough)
    except BaseException:
        index.close()
        raise
    return index


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


def forget_ended_sessions(index: Index, objects: Objects, living: set[str]) -> None:
    """Take back what killed processes were about to publish: their files have no row, and nobody would count
    them."""
    with index.transaction():
        for session, key in index.reserved_keys():
            if session not in living:
                if index.find(key) is None:
                    objects.remove(key)
                index.release(session)


def _open_to_read(files: Files, folder: str, problem: str | None, notices: Notices) -> Index | None:
    """The index to read from, None where that cannot be; says so in one line, with the problem that there was
    before."""
    try:
        reader = _readable(_index_path(files, folder), files)
    except (OSError, IndexFault) as error:
        reader, cause = None, str(error)
    if reader is not None:
        if problem is not None:
            notices.once("read-only", f"{problem}; snapshots are read from it but not kept")
        return reader
    if problem is not None:
        cause = f"{problem}, and {cause}"
    notices.once("no index", f"{cause}; the run goes on without it (results do not change)")
    return None


def _readable(path: str, files: Files) -> Index:
    if files.kind(path) is None:
        raise FileNotFoundError("it has no index")
    try:
        return _checked(path, "ro")
    except IndexUnavailable:  # no log can be made on this medium: then nobody else writes
        return _checked(path, "immutable")


def _checked(path: str, mode: str) -> Index:
    index = Index(path, mode)
    try:
        refuse_newer(path, index.version())
        index.require_schema()
    except BaseException:
        index.close()
        raise
    return index


def sweep_now(files: Files, folder: str) -> list[str]:
    """Remove the temporary files of ended sessions; returns their paths, none while somebody opens the
    store."""
    lock = files.lock(os.path.join(folder, LOCK_NAME), wait_s=1.0)
    if lock is None:
        return []
    try:
        return sweep(files, folder)[1]
    finally:
        lock.release()
