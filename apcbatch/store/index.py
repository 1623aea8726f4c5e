"""Index: the SQLite table of which snapshots a store holds.

Must not know: the files themselves, tensors. All writing happens inside `transaction()`, which holds SQLite's
one write lock; whoever gives a snapshot file its name or removes it does so while holding that lock, so rows
and files agree for every process. A row's id is the first 8 bytes of its key (small, quick to find); the
whole key is compared as well, so two keys that share them cost a snapshot and never a wrong answer. No method
raises anything but an IndexFault for what the file holds or the system refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from apcbatch.store import soundness
from apcbatch.store.database import (
    Database,
    IndexDamaged,
    is_blob,
    is_count,
    is_integer,
    is_key,
    is_real,
    is_text,
)
from apcbatch.store.entry import ENTRY, ENTRY_COLUMNS, Entry, entry_of, row_id
from apcbatch.store.format import KEY_BYTES, MAX_USES
from apcbatch.store.header import Header
from apcbatch.store.schema import SCHEMA

_KEYS_A_QUERY = 512
_IN_LIST = ",".join("?" * _KEYS_A_QUERY)
_TABLES = frozenset({"meta", "snapshots", "totals", "models", "in_flight"})


@dataclass(frozen=True, slots=True)
class ModelStats:
    """What a store holds of one model; name is empty where no run has told it yet."""

    name: str
    fingerprint: str
    entries: int
    num_bytes: int
    longest_position: int
    uses: int
    last_used: float


class Index:
    """One connection to the index file; its methods may be called from any thread."""

    def __init__(self, path: str, mode: str = "rwc") -> None:
        """mode: rwc (create), ro (read only) or immutable (read only, on a medium where nobody can write)."""
        self._db = Database(path, mode)

    def is_new(self) -> bool:
        """True for a file with no tables at all."""
        return not self._db.rows("SELECT 1 FROM sqlite_master LIMIT 1", (), is_integer)

    def has_our_tables(self) -> bool:
        """True for what looks like the index of a store, sound or not."""
        tables = self._db.rows("SELECT name FROM sqlite_master WHERE type = 'table'", (), is_text)
        return {name for (name,) in tables} >= _TABLES

    def create(self, fill: Callable[[], None]) -> None:
        """Make a new file an index; fill enters what is there already, in the same transaction."""
        self.use_log()
        with self.transaction():
            for statement in SCHEMA:
                self._db.run(statement)
            fill()

    def use_log(self) -> None:
        """Write through a write-ahead log: readers never wait, and a power cut loses the last rows at
        most."""
        self._db.run("PRAGMA journal_mode = WAL")
        self._db.run("PRAGMA synchronous = NORMAL")

    def version(self) -> int:
        """The file's format: this version's or a newer one's; anything else is damage."""
        return soundness.require_version(self._db)

    def require_schema(self) -> None:
        """Raise IndexDamaged unless the tables are exactly those of this version."""
        soundness.require_schema(self._db)

    def require_sound(self, thorough: bool) -> None:
        """Raise IndexDamaged where the file is not as the store writes it. thorough: look at every value."""
        soundness.require_sound(self._db, thorough)

    def faults(self) -> list[str]:
        """What SQLite finds wrong with the file; an empty list for a sound one."""
        return soundness.faults(self._db)

    def close(self) -> None:
        self._db.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Everything inside becomes visible to every process at once, or never."""
        return self._db.transaction()

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        """Those of the keys that have a row."""
        return self.sharing(keys).intersection(keys)

    def sharing(self, keys: Collection[bytes]) -> set[bytes]:
        """The keys of the rows that have an id of one of the keys: that key itself, or one that shares its
        first 8 bytes."""
        found: set[bytes] = set()
        ids = sorted(map(row_id, keys))
        for begin in range(0, len(ids), _KEYS_A_QUERY):
            part = ids[begin : begin + _KEYS_A_QUERY]
            marks = _IN_LIST if len(part) == _KEYS_A_QUERY else ",".join("?" * len(part))
            found |= self._db.untested(f"SELECT key FROM snapshots WHERE id IN ({marks})", part)
        if not all(is_key(other) and row_id(other) in ids for other in found.difference(keys)):
            raise IndexDamaged("a row has the id of another key")
        return found

    def find(self, key: bytes) -> Entry | None:
        values = (row_id(key), key)
        statement = f"SELECT {ENTRY} FROM snapshots WHERE id = ? AND key = ?"
        rows = self._db.rows(statement, values, *ENTRY_COLUMNS)
        return entry_of(rows[0]) if rows else None

    def totals(self) -> tuple[int, int]:
        """(snapshots, bytes of their files)."""
        entries, num_bytes = self._db.row("SELECT entries, bytes FROM totals", (), is_count, is_count)
        return entries, num_bytes

    def model_id(self, fingerprint: bytes, name: str | None) -> int:
        """The row of a model, added where missing; a name given replaces the one there."""
        self._db.run(
            "INSERT INTO models (fingerprint, name) VALUES (?, ?) ON CONFLICT (fingerprint) "
            "DO UPDATE SET name = excluded.name WHERE excluded.name NOT IN ('', name)",
            (fingerprint, name or ""),
        )
        (model,) = self._db.row("SELECT id FROM models WHERE fingerprint = ?", (fingerprint,), is_integer)
        return int(model)

    def insert(self, header: Header, num_bytes: int, model: int, now: float) -> None:
        """Enter a snapshot. Its priority is the clock plus the tokens that one byte of it saves."""
        parent = row_id(header.parent) if header.parent else None
        self._db.run(
            "INSERT INTO snapshots "
            "SELECT :id, :key, :model, :position, :parent, :parent_position, :chained, :bytes, "
            "(SELECT count(*) FROM snapshots WHERE parent = :id), :now, :now, 0, "
            "clock + (:position - :parent_position) * 1.0 / :bytes FROM totals",
            {
                "id": row_id(header.key),
                "key": header.key,
                "model": model,
                "position": header.position,
                "parent": parent,
                "parent_position": header.parent_position,
                "chained": header.is_chained,
                "bytes": num_bytes,
                "now": now,
            },
        )

    def delete(self, key: bytes) -> None:
        """Remove a snapshot's row where there is one."""
        self._db.run("DELETE FROM snapshots WHERE id = ? AND key = ?", (row_id(key), key))

    def remove(self, entry: Entry) -> None:
        """Remove a row just read: exactly one, or the file is damaged. So a loop that removes until nothing
        is left takes as many steps as there are rows."""
        if self._db.run("DELETE FROM snapshots WHERE id = ?", (row_id(entry.key),)) != 1:
            raise IndexDamaged("a row that was found cannot be removed")

    def touch(self, key: bytes, uses: int, now: float) -> None:
        """Note that a snapshot was consumed, and raise its priority to what its uses are worth now."""
        self._db.run(
            f"UPDATE snapshots SET uses = min(uses + :uses, {MAX_USES}), last_used = :now, "
            "priority = (SELECT clock FROM totals) "
            "+ (uses + :uses + 1) * (position - parent_position) * 1.0 / bytes WHERE id = :id AND key = :key",
            {"uses": uses, "now": now, "id": row_id(key), "key": key},
        )

    def least_valuable(self, protected: set[bytes]) -> Entry | None:
        """The snapshot without children, and not protected, that saves the fewest tokens a byte."""
        statement = f"SELECT {ENTRY} FROM snapshots WHERE children = 0 ORDER BY priority, last_used"
        entries = map(entry_of, self._db.each(statement, (), *ENTRY_COLUMNS))
        return next((entry for entry in entries if entry.key not in protected), None)

    def deepest(self) -> Entry | None:
        """The snapshot at the highest position: one of which no other can be a descendant."""
        statement = f"SELECT {ENTRY} FROM snapshots ORDER BY position DESC LIMIT 1"
        rows = self._db.rows(statement, (), *ENTRY_COLUMNS)
        return entry_of(rows[0]) if rows else None

    def advance_clock(self, priority: float) -> None:
        """Let what is entered or used from now on count for more than what was just evicted."""
        self._db.run("UPDATE totals SET clock = max(clock, ?)", (priority,))

    def forget_future(self, now: float) -> None:
        """Take what was used after `now`, by a clock that was ahead, as used now: it ages from here on."""
        self._db.run("UPDATE snapshots SET last_used = :now WHERE last_used > :now", {"now": now})

    def leaves(self, model: int | None, unused_since: float | None, limit: int) -> list[Entry]:
        """Up to `limit` snapshots without children, of one model or of all, last used at a time or before,
        or whenever."""
        rows = self._db.rows(
            f"SELECT {ENTRY} FROM snapshots WHERE children = 0 AND (:model IS NULL OR model = :model) "
            "AND (:since IS NULL OR last_used <= :since) ORDER BY priority, last_used LIMIT :limit",
            {"model": model, "since": unused_since, "limit": limit},
            *ENTRY_COLUMNS,
        )
        return [entry_of(row) for row in rows]

    def entries_after(self, row: int | None, limit: int) -> list[Entry]:
        """Rows in the order of their ids, after a given one: for walking through all of them piece by
        piece."""
        rows = self._db.rows(
            f"SELECT {ENTRY} FROM snapshots WHERE :row IS NULL OR id > :row ORDER BY id LIMIT :limit",
            {"row": row, "limit": limit},
            *ENTRY_COLUMNS,
        )
        return [entry_of(values) for values in rows]

    def num_stranded(self) -> int:
        """Snapshots that need a parent which is not there."""
        (number,) = self._db.row(
            "SELECT count(*) FROM snapshots WHERE chained AND parent NOT IN (SELECT id FROM snapshots)",
            (),
            is_count,
        )
        return int(number)

    def recount(self) -> None:
        """Compute the totals and the numbers of children anew from the rows."""
        self._db.run("UPDATE snapshots AS s SET children = (SELECT count(*) FROM snapshots AS c WHERE c.parent = s.id)")
        self._db.run(
            "UPDATE totals SET entries = (SELECT count(*) FROM snapshots), "
            "bytes = (SELECT coalesce(sum(bytes), 0) FROM snapshots)"
        )

    def models(self, now: float) -> list[ModelStats]:
        """What is held of each model, the largest first; nothing counts as used after `now`."""
        rows = self._db.rows(
            "SELECT name, lower(hex(fingerprint)), count(*), sum(bytes), max(position), sum(uses), "
            "max(0.0, min(max(last_used), :now)) FROM snapshots JOIN models ON models.id = snapshots.model "
            "GROUP BY models.id ORDER BY sum(bytes) DESC",
            {"now": now},
            *(is_text, is_text, is_count, is_count, is_count, is_count, is_real),
        )
        return [ModelStats(*row) for row in rows]

    def model_ids(self, name: str) -> list[int]:
        """The models with this name or with a fingerprint that starts with it (hex, at least 4 digits)."""
        rows = self._db.rows("SELECT id, name, lower(hex(fingerprint)) FROM models", (), is_integer, is_text, is_text)
        return [
            model
            for model, model_name, fingerprint in rows
            if name == model_name or (len(name) >= 4 and fingerprint.startswith(name.lower()))
        ]

    def reserve(self, session: str, snapshots: Sequence[tuple[bytes, int]]) -> None:
        """Count snapshots, as (key, bytes), before they are written."""
        keys = b"".join(key for key, _ in snapshots)
        num_bytes = sum(num_bytes for _, num_bytes in snapshots)
        if snapshots:
            self._db.run("INSERT INTO in_flight VALUES (?, ?, ?)", (session, keys, num_bytes))

    def reserved_bytes(self) -> int:
        return sum(num_bytes for (num_bytes,) in self._db.rows("SELECT bytes FROM in_flight", (), is_count))

    def reserved_keys(self) -> list[tuple[str, bytes]]:
        """(session, key) of everything that was being written when its session was last heard of."""
        return [
            (session, keys[begin : begin + KEY_BYTES])
            for session, keys in self._db.rows("SELECT session, keys FROM in_flight", (), is_text, is_blob)
            for begin in range(0, len(keys), KEY_BYTES)
        ]

    def release(self, session: str) -> None:
        """Count what a session was writing no longer."""
        self._db.run("DELETE FROM in_flight WHERE session = ?", (session,))
