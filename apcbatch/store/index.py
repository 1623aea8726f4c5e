"""Index: the SQLite table of which snapshots a store holds.

Must not know: the files themselves, tensors. All writing happens inside `transaction()`, which holds SQLite's
one write lock; whoever gives a snapshot file its name or removes it does so while holding that lock, so rows
and files agree for every process. A row's id is the first 8 bytes of its key (small, quick to find); the
whole key is compared as well, so two keys that share them cost a snapshot and never a wrong answer.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote

from apcbatch.errors import UsageError
from apcbatch.store.format import FORMAT_VERSION, KEY_BYTES
from apcbatch.store.header import Header
from apcbatch.store.schema import SCHEMA

BUSY_TIMEOUT_S = 10.0
_KEYS_A_QUERY = 512
_IN_LIST = ",".join("?" * _KEYS_A_QUERY)


@dataclass(frozen=True, slots=True)
class Entry:
    """One row. parent_id is the row id of the parent; times in seconds since 1970."""

    key: bytes
    position: int
    parent_id: int | None
    parent_position: int
    num_bytes: int
    uses: int
    last_used: float
    priority: float


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


_ENTRY = "key, position, parent, parent_position, bytes, uses, last_used, priority"


def row_id(key: bytes) -> int:
    return int.from_bytes(key[:8], "little", signed=True)


def is_damaged(error: sqlite3.Error) -> bool:
    """True for `malformed` and `not a database`; locks, full disks and missing rights are
    OperationalErrors."""
    return type(error) is sqlite3.DatabaseError


class Index:
    """One connection to the index file; its methods may be called from any thread."""

    def __init__(self, path: str, mode: str = "rwc") -> None:
        """mode: rwc (create), ro (read only) or immutable (read only, on a medium where nobody can write)."""
        query = "mode=ro&immutable=1" if mode == "immutable" else f"mode={mode}"
        self._lock = threading.RLock()
        self._db = sqlite3.connect(
            f"file:{quote(path)}?{query}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        self._db.execute("PRAGMA cache_size = -16000")

    def is_new(self) -> bool:
        """True for a file with no tables at all."""
        return self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None

    def create(self, fill: Callable[[], None]) -> None:
        """Make a new file an index; fill enters what is there already, in the same transaction."""
        self.use_log()
        with self.transaction():
            for statement in SCHEMA:
                self._db.execute(statement)
            fill()

    def use_log(self) -> None:
        """Write through a write-ahead log: readers never wait, and a power cut loses the last rows at
        most."""
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")

    def check_version(self, path: str) -> None:
        """Raise UsageError for another program's database and for a newer format than this version knows."""
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"meta", "snapshots", "totals", "models", "in_flight"} <= tables:
            raise UsageError(
                f"{path} is a database but not the index of a snapshot store; give another --store folder"
            )
        row = self._db.execute("SELECT value FROM meta WHERE name = 'format_version'").fetchone()
        if row is None or row[0] != FORMAT_VERSION:
            raise UsageError(
                f"{path} has the store format {row[0] if row else 'unknown'}, this version of apcbatch knows "
                f"{FORMAT_VERSION}; use a newer apcbatch, or another --store folder"
            )

    def faults(self) -> list[str]:
        """What SQLite finds wrong with the file; an empty list for a sound one."""
        lines = [line for (line,) in self._db.execute("PRAGMA quick_check(20)")]
        return [] if lines == ["ok"] else lines

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside becomes visible to every process at once, or never."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        """Those of the keys that have a row."""
        return self.sharing(keys).intersection(keys)

    def sharing(self, keys: Collection[bytes]) -> set[bytes]:
        """The keys of the rows that have an id of one of the keys: that key itself, or one that shares its
        first 8 bytes."""
        found: set[bytes] = set()
        ids = sorted(map(row_id, keys))
        with self._lock:
            for begin in range(0, len(ids), _KEYS_A_QUERY):
                part = ids[begin : begin + _KEYS_A_QUERY]
                marks = _IN_LIST if len(part) == _KEYS_A_QUERY else ",".join("?" * len(part))
                rows = self._db.execute(f"SELECT key FROM snapshots WHERE id IN ({marks})", part)
                found.update(key for (key,) in rows.fetchall())
        return found

    def find(self, key: bytes) -> Entry | None:
        with self._lock:
            row = self._db.execute(
                f"SELECT {_ENTRY} FROM snapshots WHERE id = ? AND key = ?", (row_id(key), key)
            ).fetchone()
        return Entry(*row) if row else None

    def totals(self) -> tuple[int, int]:
        """(snapshots, bytes of their files)."""
        with self._lock:
            entries, num_bytes = self._db.execute("SELECT entries, bytes FROM totals").fetchone()
        return entries, num_bytes

    def model_id(self, fingerprint: bytes, name: str | None) -> int:
        """The row of a model, added where missing; a name given replaces the one there."""
        self._db.execute(
            "INSERT INTO models (fingerprint, name) VALUES (?, ?) ON CONFLICT (fingerprint) "
            "DO UPDATE SET name = excluded.name WHERE excluded.name NOT IN ('', name)",
            (fingerprint, name or ""),
        )
        row = self._db.execute("SELECT id FROM models WHERE fingerprint = ?", (fingerprint,)).fetchone()
        return int(row[0])

    def insert(self, header: Header, num_bytes: int, model: int, now: float) -> None:
        """Enter a snapshot. Its priority is the clock plus the tokens that one byte of it saves."""
        parent = row_id(header.parent) if header.parent else None
        self._db.execute(
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
        self._db.execute("DELETE FROM snapshots WHERE id = ? AND key = ?", (row_id(key), key))

    def touch(self, key: bytes, uses: int, now: float) -> None:
        """Note that a snapshot was consumed, and raise its priority to what its uses are worth now."""
        self._db.execute(
            "UPDATE snapshots SET uses = uses + :uses, last_used = max(last_used, :now), "
            "priority = (SELECT clock FROM totals) "
            "+ (uses + :uses + 1) * (position - parent_position) * 1.0 / bytes WHERE id = :id AND key = :key",
            {"uses": uses, "now": now, "id": row_id(key), "key": key},
        )

    def least_valuable(self, protected: set[bytes]) -> Entry | None:
        """The snapshot without children, and not protected, that saves the fewest tokens a byte."""
        rows = self._db.execute(
            f"SELECT {_ENTRY} FROM snapshots WHERE children = 0 ORDER BY priority, last_used"
        )
        return next((Entry(*row) for row in rows if row[0] not in protected), None)

    def advance_clock(self, priority: float) -> None:
        """Let what is entered or used from now on count for more than what was just evicted."""
        self._db.execute("UPDATE totals SET clock = max(clock, ?)", (priority,))

    def leaves(self, model: int | None, unused_since: float | None, limit: int) -> list[bytes]:
        """Up to `limit` keys without children, of one model or of all, last used before a time or
        whenever."""
        rows = self._db.execute(
            "SELECT key FROM snapshots WHERE children = 0 AND (:model IS NULL OR model = :model) "
            "AND (:since IS NULL OR last_used < :since) ORDER BY priority, last_used LIMIT :limit",
            {"model": model, "since": unused_since, "limit": limit},
        )
        return [key for (key,) in rows.fetchall()]

    def entries_after(self, row: int | None, limit: int) -> list[Entry]:
        """Rows in the order of their ids, after a given one: for walking through all of them piece by
        piece."""
        with self._lock:
            rows = self._db.execute(
                f"SELECT {_ENTRY} FROM snapshots WHERE :row IS NULL OR id > :row ORDER BY id LIMIT :limit",
                {"row": row, "limit": limit},
            )
            return [Entry(*values) for values in rows.fetchall()]

    def num_stranded(self) -> int:
        """Snapshots that need a parent which is not there."""
        with self._lock:
            row = self._db.execute(
                "SELECT count(*) FROM snapshots WHERE chained AND parent NOT IN (SELECT id FROM snapshots)"
            ).fetchone()
        return int(row[0])

    def recount(self) -> None:
        """Compute the totals and the numbers of children anew from the rows."""
        self._db.execute(
            "UPDATE snapshots AS s SET children = (SELECT count(*) FROM snapshots AS c WHERE c.parent = s.id)"
        )
        self._db.execute(
            "UPDATE totals SET entries = (SELECT count(*) FROM snapshots), "
            "bytes = (SELECT coalesce(sum(bytes), 0) FROM snapshots)"
        )

    def models(self) -> list[ModelStats]:
        with self._lock:
            rows = self._db.execute(
                "SELECT name, lower(hex(fingerprint)), count(*), sum(bytes), max(position), sum(uses), "
                "max(last_used) FROM snapshots JOIN models ON models.id = snapshots.model "
                "GROUP BY models.id ORDER BY sum(bytes) DESC"
            )
            return [ModelStats(*row) for row in rows.fetchall()]

    def model_ids(self, name: str) -> list[int]:
        """The models with this name or with a fingerprint that starts with it (hex, at least 4 digits)."""
        with self._lock:
            rows = self._db.execute("SELECT id, name, lower(hex(fingerprint)) FROM models").fetchall()
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
            self._db.execute("INSERT INTO in_flight VALUES (?, ?, ?)", (session, keys, num_bytes))

    def reserved_bytes(self) -> int:
        return int(self._db.execute("SELECT coalesce(sum(bytes), 0) FROM in_flight").fetchone()[0])

    def reserved_keys(self) -> list[tuple[str, bytes]]:
        """(session, key) of everything that was being written when its session was last heard of."""
        rows = self._db.execute("SELECT session, keys FROM in_flight").fetchall()
        return [
            (session, keys[begin : begin + KEY_BYTES])
            for session, keys in rows
            for begin in range(0, len(keys), KEY_BYTES)
        ]

    def release(self, session: str) -> None:
        """Count what a session was writing no longer."""
        self._db.execute("DELETE FROM in_flight WHERE session = ?", (session,))
