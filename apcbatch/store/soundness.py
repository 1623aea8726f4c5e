"""Soundness: whether an index file can be trusted, as one look at all of it when it is opened.

Must not know: the snapshot files. Every opening looks at what no later call would notice: that the tables,
triggers and indexes are written exactly as this version writes them; that SQLite finds the file whole; that
each row's id belongs to its key; that the totals are those of the rows; what is being written. That takes
about 0.1 s for a hundred thousand rows. Other values are tested where they are used. A thorough look, three
times as long, tests every value, and SQLite's indexes against the rows. What only the files can tell (the
rest of a key, the bytes) is `store check`'s to verify.
"""

from __future__ import annotations

import sqlite3
from functools import cache

from apcbatch.store.database import Database, IndexDamaged, is_blob, is_count, is_integer, is_real, is_text
from apcbatch.store.entry import row_id
from apcbatch.store.format import (
    FORMAT_VERSION,
    KEY_BYTES,
    MAX_FILE_BYTES,
    MAX_FINGERPRINT_BYTES,
    MAX_POSITION,
    MAX_PRIORITY,
    MAX_USES,
)
from apcbatch.store.schema import SCHEMA

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


def require_version(database: Database) -> int:
    """The file's format: this version's, or a newer one's; raises IndexDamaged for anything else."""
    (version,) = database.row("SELECT value FROM meta WHERE name = 'format_version'", (), is_integer)
    if not FORMAT_VERSION <= version < 1 << 16:
        raise IndexDamaged(f"it claims the format {version}")
    return int(version)


def require_schema(database: Database) -> None:
    """Raise IndexDamaged unless the tables, triggers and indexes are exactly those of this version."""
    found = {
        (kind, name, table, statement or "")
        for kind, name, table, statement in database.rows(_OBJECTS, (), is_text, is_text, is_text, _is_text_or_none)
    }
    if found != _expected_objects():
        raise IndexDamaged("its tables are not those of a snapshot store")


def faults(database: Database, pragma: str = "integrity_check") -> list[str]:
    """What SQLite finds wrong with the file; an empty list for a sound one."""
    lines = [line for (line,) in database.rows(f"PRAGMA {pragma}(20)", (), is_text)]
    return [] if lines == ["ok"] else lines


def require_sound(database: Database, thorough: bool) -> None:
    """Raise IndexDamaged where the file is not as the store writes it; see above for what is looked at."""
    with database.transaction("BEGIN"):  # one state of the file for all the looks, whoever writes meanwhile
        require_schema(database)
        if lines := faults(database, "integrity_check" if thorough else "quick_check"):
            raise IndexDamaged(lines[0].splitlines()[-1][:200])
        database.add_function("row_id", _row_id_or_none)
        _require_sound_totals(database)
        _require_sound_side_tables(database)
        if thorough:
            _require_sound_rows(database)


def _require_sound_totals(database: Database) -> None:
    """The ids, the totals, and no more children than there are rows with a parent."""
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
    """Every value of every row, and the numbers of children."""
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
    """What SQLite keeps of the schema's statements."""
    connection = sqlite3.connect(":memory:")
    try:
        for statement in SCHEMA:
            connection.execute(statement)
        return frozenset((kind, name, table, sql or "") for kind, name, table, sql in connection.execute(_OBJECTS))
    finally:
        connection.close()


def _row_id_or_none(key: object) -> int | None:
    return row_id(key) if type(key) is bytes else None


def _is_text_or_none(value: object) -> bool:
    return value is None or is_text(value)
