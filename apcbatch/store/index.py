"""Index: the SQLite table of the snapshots that a store holds.

All writes happen inside `transaction()`, which holds SQLite's only write lock. Snapshot files are renamed and removed
only while that lock is held, so rows and files agree for every process.

A row's id is the first 8 bytes of its key, which is small and fast to find. The whole key is compared as well, so two
keys with the same id cost one of the two snapshots, and never a wrong answer. Every fault of the file or the system is
raised as IndexFault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from apcbatch.store.database import (
    ENTRY,
    ENTRY_COLUMNS,
    SCHEMA,
    Database,
    Entry,
    IndexDamaged,
    Values,
    entry_of,
    is_blob,
    is_count,
    is_integer,
    is_key,
    is_real,
    is_text,
    row_id,
)
from apcbatch.store.format import KEY_BYTES, MAX_USES, Header

_KEYS_A_QUERY = 512
_IN_LIST = ",".join("?" * _KEYS_A_QUERY)
_TABLES = frozenset({"meta", "snapshots", "totals", "models", "in_flight"})


@dataclass(frozen=True, slots=True)
class ModelStats:
    """Contents of a store for one model.

    name: empty until a run has registered the model. fingerprint: in hex. entries: number of snapshots. num_bytes: size
    of their files. longest_position: in tokens. last_used: seconds since 1970.
    """

    name: str
    fingerprint: str
    entries: int
    num_bytes: int
    longest_position: int
    uses: int
    last_used: float


class Index:
    """One connection to the index file. Any thread may call its methods."""

    def __init__(self, path: str, mode: str = "rwc") -> None:
        """mode: see Database."""
        self.database = Database(path, mode)

    def is_new(self) -> bool:
        """Return whether the file has no tables."""
        return not self.database.rows("SELECT 1 FROM sqlite_master LIMIT 1", (), is_integer)

    def has_our_tables(self) -> bool:
        """Return whether the file has the tables of a store, intact or not."""
        tables = self.database.rows("SELECT name FROM sqlite_master WHERE type = 'table'", (), is_text)
        return {name for (name,) in tables} >= _TABLES

    def create(self, fill: Callable[[], None]) -> None:
        """Create the tables. fill: enters the existing snapshots, in the same transaction."""
        self.use_log()
        with self.transaction():
            for statement in SCHEMA:
                self.database.run(statement)
            fill()

    def use_log(self) -> None:
        """Use a write-ahead log: readers never wait, and a power cut loses at most the last rows."""
        self.database.run("PRAGMA journal_mode = WAL")
        self.database.run("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        self.database.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Commit everything inside at once for all processes, or roll it back on an exception."""
        return self.database.transaction()

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        """Return the keys that have a row."""
        return self.sharing(keys).intersection(keys)

    def sharing(self, keys: Collection[bytes]) -> set[bytes]:
        """Return the keys of the rows that have the id of a given key: the given keys that have a row, and every other
        key whose first 8 bytes are those of a given key."""
        found: set[bytes] = set()
        ids = sorted(map(row_id, keys))
        for begin in range(0, len(ids), _KEYS_A_QUERY):
            part = ids[begin : begin + _KEYS_A_QUERY]
            marks = _IN_LIST if len(part) == _KEYS_A_QUERY else ",".join("?" * len(part))
            found |= self.database.unchecked(f"SELECT key FROM snapshots WHERE id IN ({marks})", part)
        if not all(is_key(other) and row_id(other) in ids for other in found.difference(keys)):
            raise IndexDamaged("a row has the id of another key")
        return found

    def find(self, key: bytes) -> Entry | None:
        """Return the row of a key; None if there is none."""
        return next(iter(self._entries("WHERE id = ? AND key = ?", (row_id(key), key))), None)

    def ids(self) -> set[int]:
        """Return the ids of all rows."""
        return self.database.unchecked("SELECT id FROM snapshots", ())

    def totals(self) -> tuple[int, int]:
        """Return (number of snapshots, bytes of their files)."""
        entries, num_bytes = self.database.row("SELECT entries, bytes FROM totals", (), is_count, is_count)
        return entries, num_bytes

    def model_id(self, fingerprint: bytes, name: str | None) -> int:
        """Return the row id of a model, adding the model if missing. name: replaces the stored name unless empty or
        None."""
        self.database.run(
            "INSERT INTO models (fingerprint, name) VALUES (?, ?) ON CONFLICT (fingerprint) "
            "DO UPDATE SET name = excluded.name WHERE excluded.name NOT IN ('', name)",
            (fingerprint, name or ""),
        )
        (model,) = self.database.row("SELECT id FROM models WHERE fingerprint = ?", (fingerprint,), is_integer)
        return int(model)

    def insert(self, header: Header, num_bytes: int, model: int, now: float) -> None:
        """Enter a snapshot. Its priority is the clock plus the tokens that one byte of it saves."""
        self.database.run(
            "INSERT INTO snapshots "
            "SELECT :id, :key, :model, :position, :parent, :parent_position, :chained, :bytes, "
            "(SELECT count(*) FROM snapshots WHERE parent = :id), :now, :now, 0, "
            "clock + (:position - :parent_position) * 1.0 / :bytes FROM totals",
            {
                "id": row_id(header.key),
                "key": header.key,
                "model": model,
                "position": header.position,
                "parent": row_id(header.parent) if header.parent else None,
                "parent_position": header.parent_position,
                "chained": header.is_chained,
                "bytes": num_bytes,
                "now": now,
            },
        )

    def delete(self, key: bytes) -> None:
        """Remove a snapshot's row, if there is one."""
        self.database.run("DELETE FROM snapshots WHERE id = ? AND key = ?", (row_id(key), key))

    def remove(self, entry: Entry) -> None:
        """Remove a row that was just read. Raises IndexDamaged if that does not delete exactly one row.

        So a loop that removes all rows ends after one step per row.
        """
        if self.database.run("DELETE FROM snapshots WHERE id = ?", (row_id(entry.key),)) != 1:
            raise IndexDamaged("a row that was found cannot be removed")

    def touch(self, key: bytes, uses: int, now: float) -> None:
        """Count uses of a snapshot, and raise its priority accordingly."""
        self.database.run(
            f"UPDATE snapshots SET uses = min(uses + :uses, {MAX_USES}), last_used = :now, "
            "priority = (SELECT clock FROM totals) "
            "+ (uses + :uses + 1) * (position - parent_position) * 1.0 / bytes WHERE id = :id AND key = :key",
            {"uses": uses, "now": now, "id": row_id(key), "key": key},
        )

    def least_valuable(self, protected: set[bytes]) -> Entry | None:
        """Return the unprotected snapshot without children that has the lowest priority; None if there is none."""
        statement = f"SELECT {ENTRY} FROM snapshots WHERE children = 0 ORDER BY priority, last_used"
        entries = map(entry_of, self.database.each(statement, (), *ENTRY_COLUMNS))
        return next((entry for entry in entries if entry.key not in protected), None)

    def deepest(self) -> Entry | None:
        """Return the snapshot at the highest position, which cannot have descendants; None if there is none."""
        return next(iter(self._entries("ORDER BY position DESC LIMIT 1", ())), None)

    def advance_clock(self, priority: float) -> None:
        """Raise the clock to an evicted priority. Snapshots entered or used from now on rank above it."""
        self.database.run("UPDATE totals SET clock = max(clock, ?)", (priority,))

    def forget_future(self, now: float) -> None:
        """Set last uses that lie in the future, written when a clock was ahead, to `now`, so that they age."""
        self.database.run("UPDATE snapshots SET last_used = :now WHERE last_used > :now", {"now": now})

    def leaves(self, model: int | None, unused_since: float | None, limit: int) -> list[Entry]:
        """Return up to `limit` snapshots without children, by ascending priority.

        model: row id of a model, or None for all. unused_since: only those last used at that time or before; None for
        all.
        """
        return self._entries(
            "WHERE children = 0 AND (:model IS NULL OR model = :model) AND (:since IS NULL OR last_used <= :since) "
            "ORDER BY priority, last_used LIMIT :limit",
            {"model": model, "since": unused_since, "limit": limit},
        )

    def entries_after(self, row: int | None, limit: int) -> list[Entry]:
        """Return up to `limit` rows with ids above `row`, ascending. row: None to begin at the first."""
        return self._entries("WHERE :row IS NULL OR id > :row ORDER BY id LIMIT :limit", {"row": row, "limit": limit})

    def _entries(self, clauses: str, values: Values) -> list[Entry]:
        """Return the rows that the SQL clauses select, in their order."""
        rows = self.database.rows(f"SELECT {ENTRY} FROM snapshots {clauses}", values, *ENTRY_COLUMNS)
        return [entry_of(row) for row in rows]

    def num_stranded(self) -> int:
        """Return the number of snapshots that need a missing parent."""
        (number,) = self.database.row(
            "SELECT count(*) FROM snapshots WHERE chained AND parent NOT IN (SELECT id FROM snapshots)",
            (),
            is_count,
        )
        return int(number)

    def recount(self) -> None:
        """Recompute the totals and the numbers of children from the rows."""
        self.database.run(
            "UPDATE snapshots AS s SET children = (SELECT count(*) FROM snapshots AS c WHERE c.parent = s.id)"
        )
        self.database.run(
            "UPDATE totals SET entries = (SELECT count(*) FROM snapshots), "
            "bytes = (SELECT coalesce(sum(bytes), 0) FROM snapshots)"
        )

    def models(self, now: float) -> list[ModelStats]:
        """Return the contents by model, the largest first. A last use after `now` is given as `now`."""
        rows = self.database.rows(
            "SELECT name, lower(hex(fingerprint)), count(*), sum(bytes), max(position), sum(uses), "
            "max(0.0, min(max(last_used), :now)) FROM snapshots JOIN models ON models.id = snapshots.model "
            "GROUP BY models.id ORDER BY sum(bytes) DESC",
            {"now": now},
            *(is_text, is_text, is_count, is_count, is_count, is_count, is_real),
        )
        return [ModelStats(*row) for row in rows]

    def model_ids(self, name: str) -> list[int]:
        """Return the row ids of the models with this name, or with a fingerprint that starts with it (hex, at least 4
        digits)."""
        rows = self.database.rows(
            "SELECT id, name, lower(hex(fingerprint)) FROM models", (), is_integer, is_text, is_text
        )
        return [
            model
            for model, model_name, fingerprint in rows
            if name == model_name or (len(name) >= 4 and fingerprint.startswith(name.lower()))
        ]

    def reserve(self, session: str, snapshots: Sequence[tuple[bytes, int]]) -> None:
        """Reserve the bytes of snapshots before they are written. snapshots: (key, bytes) of each."""
        keys = b"".join(key for key, _ in snapshots)
        num_bytes = sum(num_bytes for _, num_bytes in snapshots)
        if snapshots:
            self.database.run("INSERT INTO in_flight VALUES (?, ?, ?)", (session, keys, num_bytes))

    def reserved_bytes(self) -> int:
        return sum(num_bytes for (num_bytes,) in self.database.rows("SELECT bytes FROM in_flight", (), is_count))

    def reserved_keys(self) -> list[tuple[str, bytes]]:
        """Return (session, key) of every reserved snapshot."""
        return [
            (session, keys[begin : begin + KEY_BYTES])
            for session, keys in self.database.rows("SELECT session, keys FROM in_flight", (), is_text, is_blob)
            for begin in range(0, len(keys), KEY_BYTES)
        ]

    def release(self, session: str) -> None:
        """Drop a session's reservations."""
        self.database.run("DELETE FROM in_flight WHERE session = ?", (session,))
