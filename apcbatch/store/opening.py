"""Opening: finds out what can be done with a store folder, and leaves it sound.

Must not know: what is stored in it. A folder that is not a store, and not empty, is refused before anything
in it is changed. A store that cannot be written is read; where that does not help either, it is empty for
this run. Each costs one line.
Invariant: whoever changes the folder as a whole (a new index, the leftovers of ended sessions) holds the
store's lock.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from apcbatch.errors import UsageError
from apcbatch.store.database import IndexDamaged, IndexFault, IndexUnavailable
from apcbatch.store.files import Files, not_plain
from apcbatch.store.format import INDEX_NAME, LOCK_NAME, OBJECTS_FOLDER, TEMPORARY_FOLDER
from apcbatch.store.index import Index
from apcbatch.store.marker import identify, put_marker, refuse_newer
from apcbatch.store.notices import Notices
from apcbatch.store.repair import IndexOpener, index_path
from apcbatch.store.session import Session, sweep

LOCK_TIMEOUT_S = 60.0


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
    try:
        if files.kind(folder) is not None:
            raise UsageError(f"--store {folder} is not a folder; give a folder, new or of an earlier run")
        if not may_create:
            raise UsageError(f"there is no store at {folder}; give the --store folder of an earlier run")
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
    files.follow_mode(os.path.join(folder, INDEX_NAME))
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
        index = IndexOpener(files, folder, living, thorough, notices).open()
        try:
            reader = Index(os.path.join(folder, INDEX_NAME), "ro")
            session = Session(files, folder)
        except BaseException:
            index.close()
            raise
        return Opened(reader, index, session)
    finally:
        lock.release()


def _open_to_read(files: Files, folder: str, problem: str | None, notices: Notices) -> Index | None:
    """The index to read from, None where that cannot be; says so in one line, with the problem that there was
    before."""
    try:
        reader = _readable(index_path(files, folder), files)
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
        if index.is_new():
            raise IndexDamaged("its index is empty")
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
