"""Repair: check the index when a store is opened; rename a damaged one and rebuild it from the snapshot files.

Every opening checks for faults that no later call would notice:
- The tables, triggers and indexes are exactly those of this version.
- SQLite finds the file intact.
- Each row's id belongs to its key.
- The totals match the rows.
- The reservations consist of whole keys.
- Each snapshot file has a row, unless other processes have the store open. A power cut loses the index's last rows;
  their files are entered again, so that the size limit counts them.

That takes about 0.4 s for a hundred thousand rows. Other values are checked when they are used. A thorough check takes
three times as long; it also checks every value, and SQLite's indexes against the rows. `store check` verifies the rest:
whole keys and the files.

The caller must hold the store's lock. A rebuilt index loses only the uses of the snapshots and the names of the models;
everything else is in the headers of the files.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from functools import cache

from apcbatch.errors import UsageError
from apcbatch.store.database import (
    SCHEMA,
    Database,
    IndexDamaged,
    is_blob,
    is_count,
    is_integer,
    is_real,
    is_text,
    row_id,
)
from apcbatch.store.environment import Files, not_plain
from apcbatch.store.format import (
    ASIDE_SUFFIX,
    FORMAT_VERSION,
    INDEX_COMPANIONS,
    INDEX_NAME,
    KEY_BYTES,
    MAX_FILE_BYTES,
    MAX_FINGERPRINT_BYTES,
    MAX_POSITION,
    MAX_PRIORITY,
    MAX_USES,
    SUSPECT_NAME,
    BadSnapshot,
)
from apcbatch.store.index import Index
from apcbatch.store.snapshot_file import SnapshotFolder
from apcbatch.store.status import Status

_OBJECTS = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"

_IS_SOUND_ROW = f"""
    typeof(key) = 'blob' AND length(key) = {KEY_BYTES}
    AND typeof(model) = 'integer' AND model IN (SELECT id FROM models)
    AND typeof(position) = 'integer' AND position <= {MAX_POSITION}
    AND typeof(parent_position) = 'integer' AND 0 <= parent_position AND parent_position < position
    AND typeof(parent) IN ('integer', 'null') AND typeof(chained) = 'integer' AND chained IN (0, 1)
    AND typeof(bytes) = 'integer' AND bytes BETWEEN 1 AND {MAX_FILE_BYTES}
    AND typeof(children) = 'integer' AND children >= 0
    AND typeof(created) = 'real' AND abs(created) < 1e308
    AND typeof(last_used) = 'real' AND abs(last_used) < 1e308
    AND typeof(uses) = 'integer' AND uses BETWEEN 0 AND {MAX_USES}
    AND typeof(priority) = 'real' AND priority BETWEEN 0 AND {MAX_PRIORITY}"""


def refuse_newer(path: str, version: int) -> None:
    """Raise UsageError for a format version above FORMAT_VERSION."""
    if version > FORMAT_VERSION:
        raise UsageError(
            f"{path} has the store format {version}, this version of apcbatch knows {FORMAT_VERSION}; use a "
            "newer apcbatch, or another --store folder"
        )


def require_version(database: Database, path: str) -> None:
    """Raise UsageError for an index of a newer version, and IndexDamaged for an impossible version."""
    (version,) = database.row("SELECT value FROM meta WHERE name = 'format_version'", (), is_integer)
    if not FORMAT_VERSION <= version < 1 << 16:
        raise IndexDamaged(f"it claims the format {version}")
    refuse_newer(path, version)


def require_schema(database: Database) -> None:
    """Raise IndexDamaged unless the tables, triggers and indexes are exactly those of this version."""
    found = {
        (kind, name, table, statement or "")
        for kind, name, table, statement in database.rows(
            _OBJECTS, (), is_text, is_text, is_text, lambda value: value is None or is_text(value)
        )
    }
    if found != _expected_objects():
        raise IndexDamaged("its tables are not those of a snapshot store")


def faults(database: Database, pragma: str = "integrity_check") -> list[str]:
    """Return the faults that SQLite finds in the file; empty if it is intact."""
    lines = [line for (line,) in database.rows(f"PRAGMA {pragma}(20)", (), is_text)]
    return [] if lines == ["ok"] else lines


def require_sound(database: Database, thorough: bool) -> None:
    """Raise IndexDamaged unless the file is as the store writes it. The module's docstring lists the checks."""
    with database.transaction("BEGIN"):  # so that all checks see the same state of the file
        require_schema(database)
        if lines := faults(database, "integrity_check" if thorough else "quick_check"):
            raise IndexDamaged(lines[0].splitlines()[-1][:200])
        database.add_function("row_id", lambda key: row_id(key) if is_blob(key) else None)
        _require_sound_totals(database)
        _require_sound_side_tables(database)
        if thorough:
            _require_sound_rows(database)


def _require_sound_totals(database: Database) -> None:
    """Check that row ids match keys, that the totals match the rows, and that the sum of `children` is at most the
    number of rows with a parent."""
    entries, num_bytes, children, with_parent, num_keyed = database.row(
        "SELECT count(*), coalesce(sum(bytes), 0), coalesce(sum(children), 0), count(parent), "
        "coalesce(sum(row_id(key) = id), 0) FROM snapshots",
        (),
        *(is_count, is_count, is_count, is_count, is_count),
    )
    if num_keyed != entries:
        raise IndexDamaged(f"{entries - num_keyed} of its rows have the id of another key")
    totals = database.row("SELECT entries, bytes, clock FROM totals", (), is_count, is_count, is_real)
    if totals[:2] != (entries, num_bytes) or not 0 <= totals[2] <= MAX_PRIORITY or children > with_parent:
        raise IndexDamaged("its totals are not those of its rows")


def _require_sound_rows(database: Database) -> None:
    """Check every value of every row, and the numbers of children."""
    (num_unsound,) = database.row(f"SELECT coalesce(sum(NOT ({_IS_SOUND_ROW})), 0) FROM snapshots", (), is_count)
    (num_miscounted,) = database.row(
        "SELECT count(*) FROM snapshots AS s "
        "WHERE children != (SELECT count(*) FROM snapshots AS c WHERE c.parent = s.id)",
        (),
        is_count,
    )
    if num_unsound or num_miscounted:
        raise IndexDamaged(
            f"{num_unsound} of its rows hold values that the store never writes, "
            f"{num_miscounted} count other children than they have"
        )


def _require_sound_side_tables(database: Database) -> None:
    """Check the tables of models and of reservations."""
    for _, fingerprint, _ in database.rows(
        "SELECT id, fingerprint, name FROM models", (), is_integer, is_blob, is_text
    ):
        if not 1 <= len(fingerprint) <= MAX_FINGERPRINT_BYTES:
            raise IndexDamaged("a model has no fingerprint")
    for _, keys, num_bytes in database.rows(
        "SELECT session, keys, bytes FROM in_flight", (), is_text, is_blob, is_count
    ):
        if len(keys) % KEY_BYTES or num_bytes > len(keys) // KEY_BYTES * MAX_FILE_BYTES:
            raise IndexDamaged("what is being written has no whole keys")


@cache
def _expected_objects() -> frozenset[tuple[str, str, str, str]]:
    """Return (type, name, table, SQL) of each object of the schema, as SQLite stores it."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in SCHEMA:
            connection.execute(statement)
        return frozenset((kind, name, table, sql or "") for kind, name, table, sql in connection.execute(_OBJECTS))


_WRITE_VERSION_AT = 18
_LOG_VERSION = 2


def index_path(files: Files, folder: str) -> str:
    """Return the path of the index.

    Raises OSError if the index, or a file that SQLite keeps next to it, is anything but a plain file.
    """
    path = os.path.join(folder, INDEX_NAME)
    for suffix in ("", *INDEX_COMPANIONS):
        if files.kind(path + suffix) not in (None, "file"):
            raise not_plain(path + suffix, "file")
    return path


@dataclass(frozen=True, slots=True)
class IndexOpener:
    """Opens the index of one store. living: names of the sessions that have it open. thorough: check every value."""

    files: Files
    folder: str
    living: set[str]
    thorough: bool
    status: Status

    def open(self) -> Index:
        """Open the index, and rebuild it if it is damaged.

        Raises IndexDamaged if it is damaged and other processes have it open.
        """
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
        """Open the index, or make it from the snapshot files if there is none. reason: start of the warning about a new
        index."""
        path = index_path(self.files, self.folder)
        _require_log_version(self.files, path)
        snapshots = SnapshotFolder(self.files, self.folder)
        self.files.touch(path)  # SQLite would create it readable by all users; its log gets the same mode
        index = Index(path)
        try:
            if index.is_new():
                index.create(lambda: self._fill(index, snapshots, reason))
            else:
                require_version(index.database, path)
                index.use_log()
                require_sound(index.database, self.thorough)
                _drop_reservations(index, snapshots, self.living)
                if not self.living:
                    self._enter_unlisted(index, snapshots)
        except BaseException:
            index.close()
            raise
        return index

    def _fill(self, index: Index, snapshots: SnapshotFolder, reason: str) -> None:
        """Enter every snapshot file into a new index."""
        num_entered, num_unusable = _enter_files(index, snapshots)
        if reason or num_entered or num_unusable:
            self.status.once(
                "rebuilt",
                f"{reason}a new index was made from the snapshot files: {num_entered} snapshots are in it, "
                f"{num_unusable} could not be used",
            )

    def _enter_unlisted(self, index: Index, snapshots: SnapshotFolder) -> None:
        """Enter the snapshot files that have no row."""
        with index.transaction():
            num_entered, num_unusable = _enter_files(index, snapshots)
        if num_entered or num_unusable:
            self.status.once(
                "unlisted",
                "snapshot files were missing in the index, which a power cut can cause: "
                f"{num_entered} were entered, {num_unusable} could not be used",
            )


def _put_aside(files: Files, path: str) -> None:
    """Rename the index and the files that SQLite keeps next to it, replacing those renamed before."""
    aside = path + ASIDE_SUFFIX
    for suffix in ("", *INDEX_COMPANIONS):
        if files.kind(aside + suffix) not in (None, "file"):
            raise not_plain(aside + suffix, "file")
        files.unlink(aside + suffix)
    for suffix in (*INDEX_COMPANIONS, ""):  # the index last: after a kill the next opening renames it again
        if files.kind(path + suffix) is not None:
            files.rename(path + suffix, aside + suffix)


def _require_log_version(files: Files, path: str) -> None:
    """Raise IndexDamaged if the file's header forbids writing.

    SQLite reports such a file as read-only, which would be mistaken for missing rights.
    """
    if files.kind(path) is None or files.size(path) <= _WRITE_VERSION_AT:
        return
    with files.open(path) as reader:
        head = bytearray(_WRITE_VERSION_AT + 1)
        reader.read_into(0, memoryview(head))
    if head[_WRITE_VERSION_AT] > _LOG_VERSION:
        raise IndexDamaged("it claims to be of a newer SQLite")


def _enter_files(index: Index, snapshots: SnapshotFolder) -> tuple[int, int]:
    """Enter every snapshot file without a row if its header is valid, and remove it otherwise. Return (number entered,
    number of files that could not be used).

    Tensors are verified when they are read. The caller must be inside a transaction.
    """
    num_entered = num_unusable = 0
    now, ids = time.time(), index.ids()
    for key in snapshots.all_keys():
        if row_id(key) in ids:
            continue
        try:
            header = snapshots.header(key)
            num_bytes, modified = snapshots.size(key), snapshots.modified(key)
        except BadSnapshot:
            snapshots.remove(key)
            num_unusable += 1
            continue
        except OSError:
            num_unusable += 1
            continue
        ids.add(row_id(key))
        model = index.model_id(header.fingerprint, None)
        index.insert(header, num_bytes, model, max(0.0, min(modified, now)))
        num_entered += 1
    return num_entered, num_unusable


def _drop_reservations(index: Index, snapshots: SnapshotFolder, living: set[str]) -> None:
    """Drop the reservations of ended sessions, and their files without a row, which no size limit would count."""
    with index.transaction():
        for session, key in index.reserved_keys():
            if session not in living:
                if index.find(key) is None:
                    snapshots.remove(key)
                index.release(session)
