"""Open a store folder: identify it, create or repair it as needed, and hold the store's lock meanwhile.

A folder that is neither a store nor empty is refused before anything in it changes. A store is recognised by its id
file, which is on the disk before anything else. A store older than id files is recognised by its index, or by a
snapshot file with a valid header.

A store that cannot be written is opened read-only. One that cannot be read either is treated as empty for this run,
with one line of warning.

Invariant: a process that changes the folder as a whole (makes a new index, removes files of ended sessions) holds the
store's lock.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from apcbatch.errors import UsageError
from apcbatch.store.database import IndexDamaged, IndexFault, IndexUnavailable
from apcbatch.store.environment import Files, not_plain
from apcbatch.store.format import (
    INDEX_NAME,
    LOCK_NAME,
    OBJECTS_FOLDER,
    STORE_ID,
    STORE_ID_NAME,
    TEMPORARY_FOLDER,
    BadSnapshot,
)
from apcbatch.store.index import Index
from apcbatch.store.repair import IndexOpener, index_path, refuse_newer, require_schema, require_version
from apcbatch.store.session import Session, sweep
from apcbatch.store.snapshot_file import SnapshotFolder
from apcbatch.store.status import WITHOUT, Status

LOCK_TIMEOUT_S = 60.0
_ANY_ID = re.compile(rb"apcbatch snapshot store ([1-9][0-9]{0,4})\n")
_MAX_ID_BYTES = 64
_MAX_FILES_TRIED = 64

Found = Literal["store", "empty", "other"]


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of an open store. reader: None if the store cannot be read. index, session: None if it cannot be
    written."""

    reader: Index | None
    index: Index | None
    session: Session | None


def open_folder(files: Files, folder: str, read_only: bool, maintenance: bool, status: Status) -> Opened:
    """Open a store's index, creating and repairing it as needed.

    maintenance: the store must exist, and every value of its index is checked.

    Raises UsageError for a path that is not a folder, a folder that cannot be created or that holds anything but a
    store, and a store of a newer version.
    """
    may_create = not (read_only or maintenance)
    if not files.is_folder(folder):
        _make_folder(files, folder, may_create)
    try:
        _require_store(folder, identify(files, folder), may_create)
    except OSError as error:
        clause = error.strerror or str(error)
        if not may_create:
            raise UsageError(f"the store {folder} cannot be read: {clause}; check its owner and mode") from error
        status.once("unreadable", f"it cannot be read ({clause}); {WITHOUT}")
        return Opened(None, None, None)
    _warn_of_network(files, folder, status)
    problem = None
    if not read_only:
        if files.is_writable(folder):
            try:
                return _open_to_write(files, folder, maintenance, status)
            except (OSError, IndexFault) as error:
                problem = f"it cannot be written ({error})"
        else:
            problem = "the folder is read-only"
    return Opened(_open_to_read(files, folder, problem, status), None, None)


def _make_folder(files: Files, folder: str, may_create: bool) -> None:
    """Create a missing folder.

    Raises UsageError if the path is not a folder, if it must not be created, or if it cannot be.
    """
    try:
        kind = files.kind(folder)
        if not may_create:
            raise UsageError(f"there is no store at {folder}; give the --store folder of an earlier run")
        if kind is not None:
            raise UsageError(f"--store {folder} is not a folder; give a folder, new or of an earlier run")
        files.make_folders(folder)
    except OSError as error:
        fault = f"the store folder {folder} cannot be {'made' if may_create else 'read'}: {error.strerror or error}"
        sentence = f"{fault}; {'give another --store' if may_create else 'check its owner and mode'}"
        raise UsageError(sentence) from error


def _require_store(folder: str, found: str, may_create: bool) -> None:
    """Raise UsageError for a folder that is not a store, and for an empty one in which no store may be created."""
    if found == "other":
        raise UsageError(
            f"{folder} is not a snapshot store and not empty, so nothing in it is touched; give "
            + ("a --store folder that is new, empty or" if may_create else "the --store folder")
            + " of an earlier run"
        )
    if found == "empty" and not may_create:
        raise UsageError(f"there is no store at {folder}; give the --store folder of an earlier run")


def _warn_of_network(files: Files, folder: str, status: Status) -> None:
    """Warn about a folder that several hosts may have mounted. One host alone may use it, so it is not refused."""
    with suppress(OSError):
        kind = files.network_file_system(folder)
        if kind is not None:
            status.once(
                "network",
                f"its folder is on {kind}, and SQLite's log is safe on one host alone: where two hosts use it at "
                "once, its index breaks and snapshots are lost (results do not change); give each host a folder on a "
                "local disk",
            )


def _open_to_write(files: Files, folder: str, thorough: bool, status: Status) -> Opened:
    """Take the store's lock, remove files of ended sessions, and open the index. thorough: check every value of the
    index."""
    files.follow_mode(os.path.join(folder, INDEX_NAME))
    _write_id(files, folder)
    for name in (OBJECTS_FOLDER, TEMPORARY_FOLDER):
        path = os.path.join(folder, name)
        if files.kind(path) not in (None, "folder"):
            raise not_plain(path, "folder")
    files.make_folders(os.path.join(folder, OBJECTS_FOLDER))
    lock = files.lock(os.path.join(folder, LOCK_NAME), LOCK_TIMEOUT_S)
    if lock is None:
        raise TimeoutError(f"another process has been opening it for {LOCK_TIMEOUT_S:.0f} s")
    with lock, ExitStack() as undo:
        living, _ = sweep(files, folder)
        index = undo.enter_context(closing(IndexOpener(files, folder, living, thorough, status).open()))
        reader = undo.enter_context(closing(Index(os.path.join(folder, INDEX_NAME), "ro")))
        opened = Opened(reader, index, Session(files, folder))
        undo.pop_all()
        return opened


def _open_to_read(files: Files, folder: str, problem: str | None, status: Status) -> Index | None:
    """Open the index read-only. Return None, with one line of warning, if it cannot be read.

    problem: why the store cannot be written; None if read-only was requested.
    """
    try:
        reader = _readable(index_path(files, folder), files)
    except (OSError, IndexFault) as error:
        reader, cause = None, str(error)
    if reader is not None:
        if problem is not None:
            status.once("read-only", f"{problem}; snapshots are read from it but not kept")
        return reader
    status.once("no index", cause if problem is None else f"{problem}, and {cause}; {WITHOUT}")
    return None


def _readable(path: str, files: Files) -> Index:
    if files.kind(path) is None:
        raise FileNotFoundError("it has no index")
    try:
        return _checked_index(path, "ro")
    except IndexUnavailable:  # SQLite cannot create its log file on this medium, so no process writes to it
        return _checked_index(path, "immutable")


def _checked_index(path: str, mode: str) -> Index:
    """Open an index that must have the version and schema of this program."""
    index = Index(path, mode)
    try:
        if index.is_new():
            raise IndexDamaged("its index is empty")
        require_version(index.database, path)
        require_schema(index.database)
    except BaseException:
        index.close()
        raise
    return index


def sweep_now(files: Files, folder: str) -> list[str]:
    """Remove the temporary files of ended sessions, and return their paths.

    Nothing is removed while another process opens the store.
    """
    if (lock := files.lock(os.path.join(folder, LOCK_NAME), wait_s=1.0)) is None:
        return []
    with lock:
        return sweep(files, folder)[1]


def identify(files: Files, folder: str) -> Found:
    """Return whether a folder is a store, empty, or something else. A truncated id file alone counts as empty.

    Changes nothing. Raises UsageError for a store of a newer version, and OSError if the folder cannot be read.
    """
    error: OSError | None = None
    try:
        store_id = _read_id(files, folder)
        if store_id == STORE_ID:
            return "store"
        if match := _ANY_ID.fullmatch(store_id or b""):
            refuse_newer(folder, int(match[1]))
        names = files.names(os.path.join(folder, ""))  # the slash: the folder itself may be a link
        if not names or (names == [STORE_ID_NAME] and store_id is not None and STORE_ID.startswith(store_id)):
            return "empty"
    except OSError as refusal:
        error = refusal
    if _has_index(files, folder) or _has_snapshot(files, folder):
        return "store"
    if error is not None:
        raise error
    return "other"


def _write_id(files: Files, folder: str) -> None:
    """Write the id file, and wait until it is on the disk."""
    with suppress(OSError):
        if _read_id(files, folder) == STORE_ID:
            return
    files.write_durably(os.path.join(folder, STORE_ID_NAME), STORE_ID)


def _read_id(files: Files, folder: str) -> bytes | None:
    """Return the content of the id file; None if there is none."""
    path = os.path.join(folder, STORE_ID_NAME)
    if files.kind(path) != "file":
        return None
    with files.open(path) as reader:
        content = bytearray(min(reader.size, _MAX_ID_BYTES))
        return bytes(content[: reader.read_into(0, memoryview(content))])


def _has_index(files: Files, folder: str) -> bool:
    """Return whether the folder has the index of a store, intact or not.

    The index is opened as immutable, because other modes create files next to it.
    """
    path = os.path.join(folder, INDEX_NAME)
    if files.kind(path) != "file":
        return False
    try:
        with closing(Index(path, "immutable")) as index:
            return index.has_our_tables()
    except IndexFault:
        return False


def _has_snapshot(files: Files, folder: str) -> bool:
    """Return whether one of the first _MAX_FILES_TRIED files with a snapshot's name has a valid header."""
    snapshots = SnapshotFolder(files, folder)
    with suppress(OSError):
        for key in islice(snapshots.all_keys(), _MAX_FILES_TRIED):
            with suppress(BadSnapshot, OSError):
                snapshots.header(key)
                return True
    return False
