"""Opening: finds out what can be done with a store folder, and leaves it sound.

Must not know: what is stored in it. A store that cannot be written is read; one whose index is missing or
damaged gets a new one from the headers of its files; where nothing helps, the store is empty for this run.
Each costs one line. Invariant: whoever changes the folder as a whole (a new index, the leftovers of ended
sessions) holds the store's lock.
"""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass

from apcbatch.errors import UsageError
from apcbatch.store.files import Files
from apcbatch.store.format import INDEX_NAME, LOCK_NAME, OBJECTS_FOLDER
from apcbatch.store.header import BadSnapshot
from apcbatch.store.index import Index, is_damaged
from apcbatch.store.notices import Notices
from apcbatch.store.objects import Objects
from apcbatch.store.session import Session, sweep

LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Opened:
    """reader: None where the store cannot even be read. index and session: None where it cannot be
    written."""

    reader: Index | None
    index: Index | None
    session: Session | None


def open_folder(files: Files, folder: str, read_only: bool, notices: Notices) -> Opened:
    """Open a store's index, creating and repairing what is needed.

    Raises UsageError for a path that is not a folder, a folder that cannot be made, an index of another
    program and a store of a newer version.
    """
    if not files.is_folder(folder):
        _make_folder(files, folder, read_only)
    if not read_only and files.is_writable(folder):
        try:
            return _open_to_write(files, folder, notices)
        except (OSError, sqlite3.Error) as error:
            sentence = f"it cannot be written ({error}); snapshots are read from it but not kept"
            notices.once("read-only", sentence)
    elif not read_only:
        notices.once("read-only", "the folder is read-only; snapshots are read from it but not kept")
    return Opened(_open_to_read(files, folder, notices), None, None)


def _make_folder(files: Files, folder: str, read_only: bool) -> None:
    if files.exists(folder):
        raise UsageError(f"--store {folder} is not a folder; give a folder, new or of an earlier run")
    if read_only:
        raise UsageError(f"there is no store at {folder}; give the --store folder of an earlier run")
    try:
        files.make_folders(folder)
    except OSError as error:
        sentence = f"the store folder {folder} cannot be made ({error}); give another --store"
        raise UsageError(sentence) from error


def _open_to_write(files: Files, folder: str, notices: Notices) -> Opened:
    files.follow_mode(os.path.join(folder, INDEX_NAME))
    files.make_folders(os.path.join(folder, OBJECTS_FOLDER))
    lock = files.lock(os.path.join(folder, LOCK_NAME), LOCK_TIMEOUT_S)
    if lock is None:
        raise TimeoutError(f"another process has been opening it for {LOCK_TIMEOUT_S:.0f} s")
    try:
        living, _ = sweep(files, folder)
        objects = Objects(files, folder)
        index = _sound_index(files, folder, objects, bool(living), notices)
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


def _sound_index(files: Files, folder: str, objects: Objects, is_in_use: bool, notices: Notices) -> Index:
    """The index, tested; a damaged one is put aside and made anew unless other processes have it open."""
    path = os.path.join(folder, INDEX_NAME)
    try:
        index = _create(files, path, objects, notices)
        try:
            if faults := index.faults():
                raise sqlite3.DatabaseError(faults[0])
            return index
        except BaseException:
            index.close()
            raise
    except sqlite3.DatabaseError as error:
        if not is_damaged(error) or is_in_use:
            raise
        notices.once("damaged", f"the index is damaged ({error}); it is made anew from the snapshot files")
    files.rename(path, f"{path}.damaged")
    for suffix in ("-wal", "-shm"):
        files.unlink(path + suffix)
    return _create(files, path, objects, notices)


def _create(files: Files, path: str, objects: Objects, notices: Notices) -> Index:
    files.touch(path)  # SQLite would let everybody read it, and gives its log the same mode
    index = Index(path)
    try:
        if index.is_new():
            index.create(lambda: _fill(index, objects, notices))
        else:
            index.check_version(path)
            index.use_log()
    except BaseException:
        index.close()
        raise
    return index


def _fill(index: Index, objects: Objects, notices: Notices) -> None:
    """Enter every snapshot file into a new index by its header; the tensors are verified when they are
    read."""
    num_entered = num_removed = 0
    for key in objects.all_keys():
        try:
            header = objects.header(key)
            model = index.model_id(header.fingerprint, None)
            index.insert(header, objects.size(key), model, objects.modified(key))
            num_entered += 1
        except BadSnapshot:
            objects.remove(key)
            num_removed += 1
        except (OSError, sqlite3.IntegrityError):
            num_removed += 1
    if num_entered or num_removed:
        sentence = f"a new index was made: {num_entered} snapshots are in it, {num_removed} could not be used"
        notices.once("rebuilt", sentence)


def forget_ended_sessions(index: Index, objects: Objects, living: set[str]) -> None:
    """Take back what killed processes were about to publish: their files have no row, and nobody would count
    them."""
    with index.transaction():
        for session, key in index.reserved_keys():
            if session not in living:
                if index.find(key) is None:
                    objects.remove(key)
                index.release(session)


def _open_to_read(files: Files, folder: str, notices: Notices) -> Index | None:
    path = os.path.join(folder, INDEX_NAME)
    if not files.exists(path):
        notices.once("no index", "it has no index; nothing is read from it")
        return None
    try:
        try:
            return _checked(path, "ro")
        except sqlite3.OperationalError:  # no log can be made on this medium: then nobody else writes
            return _checked(path, "immutable")
    except sqlite3.Error as error:
        notices.once("no index", f"its index cannot be read ({error}); nothing is read from it")
        return None


def _checked(path: str, mode: str) -> Index:
    index = Index(path, mode)
    try:
        index.check_version(path)
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
