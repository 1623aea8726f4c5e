"""Database: a connection to an SQLite file whose contents are not trusted; the schema and the row type.

All calls of sqlite3 go through here. Every error that they raise, and every value of an unexpected type, becomes an
IndexFault. So callers handle a damaged file as one kind of error, wherever the damage is.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from apcbatch.store.format import FORMAT_VERSION, KEY_BYTES, MAX_FILE_BYTES

BUSY_TIMEOUT_S = 10.0

Column = Callable[[Any], bool]
"""Returns whether a column may hold a value."""

Values = Sequence[Any] | Mapping[str, Any]

_REFUSALS = (
    "database is locked",
    "database table is locked",
    "database or disk is full",
    "attempt to write a readonly database",
    "disk I/O error",
    "unable to open database file",
    "locking protocol",
    "access permission denied",
    "interrupted",
    "Cannot operate on a closed database",
)
"""Beginnings of SQLite's messages for errors of the system, not of the file. (Python before 3.11 has no codes.)"""


class IndexFault(Exception):
    """Error of the index file. Its message is a part of a sentence, such as `a row has the id of another key`."""


class IndexUnavailable(IndexFault):
    """The system refuses access for now: a lock, a full disk, missing rights. The file may be intact."""


class IndexDamaged(IndexFault):
    """The file holds something that the store never writes."""


class _Boundary:
    """Context manager that turns every error of sqlite3 into an IndexFault.

    sqlite3 can also raise UnicodeDecodeError, since its messages may contain any bytes of the file.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.Error) and str(error).startswith(_REFUSALS):
            raise IndexUnavailable(_printable(str(error))) from error
        if isinstance(error, MemoryError):
            raise IndexUnavailable("out of memory") from error
        if isinstance(error, UnicodeError):
            raise IndexDamaged("a text in it is no text") from error
        if isinstance(error, (sqlite3.Error, sqlite3.Warning, ValueError, TypeError, OverflowError)):
            raise IndexDamaged(_printable(str(error))) from error


_BOUNDARY = _Boundary()


def is_integer(value: Any) -> bool:
    return type(value) is int


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_integer_or_none(value: Any) -> bool:
    return value is None or type(value) is int


def is_real(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def is_text(value: Any) -> bool:
    return type(value) is str


def is_blob(value: Any) -> bool:
    return type(value) is bytes


def is_key(value: Any) -> bool:
    return type(value) is bytes and len(value) == KEY_BYTES


class Database:
    """One connection. Any thread may call its methods. They raise no error but IndexFault."""

    def __init__(self, path: str, mode: str) -> None:
        """mode: `rwc` (create), `ro` (read only) or `immutable` (read only, on a medium where no process can write)."""
        query = "mode=ro&immutable=1" if mode == "immutable" else f"mode={mode}"
        self.lock = threading.RLock()
        with _BOUNDARY:
            self._connection = sqlite3.connect(
                f"file://{quote(os.fsencode(os.path.abspath(path)))}?{query}",
                uri=True,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            self._connection.text_factory = partial(str, encoding="utf-8", errors="replace")
        try:
            self.run("PRAGMA trusted_schema = OFF")
            self.run("PRAGMA cache_size = -16000")
        except BaseException:
            self.close()
            raise

    def run(self, statement: str, values: Values = ()) -> int:
        """Run one statement that returns no rows, and return the number of rows it changed."""
        with self.lock, _BOUNDARY:
            return self._connection.execute(statement, values).rowcount

    def rows(self, statement: str, values: Values, *columns: Column) -> list[tuple[Any, ...]]:
        """Return all rows. Raises IndexDamaged for a value that fails its column's check."""
        with self.lock, _BOUNDARY:
            rows = self._connection.execute(statement, values).fetchall()
        for row in rows:
            _check(row, columns)
        return rows

    def unchecked(self, statement: str, values: Values) -> set[Any]:
        """Return the values of the first column, of any type. Fast, for callers that compare thousands of keys."""
        with self.lock, _BOUNDARY:
            return {row[0] for row in self._connection.execute(statement, values)}

    def row(self, statement: str, values: Values, *columns: Column) -> tuple[Any, ...]:
        """Return the row of a statement. Raises IndexDamaged unless there is exactly one."""
        rows = self.rows(statement, values, *columns)
        if len(rows) != 1:
            raise IndexDamaged(f"it has {len(rows)} rows where there is one")
        return rows[0]

    def each(self, statement: str, values: Values, *columns: Column) -> Iterator[tuple[Any, ...]]:
        """Yield the rows one by one, for a caller that may stop early. The caller must hold `lock`."""
        with _BOUNDARY:
            cursor = self._connection.execute(statement, values)
        while True:
            with _BOUNDARY:
                row = cursor.fetchone()
            if row is None:
                return
            _check(row, columns)
            yield row

    def add_function(self, name: str, function: Callable[[Any], Any]) -> None:
        """Make a function of one argument callable in statements."""
        with _BOUNDARY:
            self._connection.create_function(name, 1, function, deterministic=True)

    @contextmanager
    def transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        """Run the block as one transaction: commit at its end, roll back on an exception. begin: statement that opens
        the transaction."""
        with self.lock:
            self.run(begin)
            try:
                yield
                self.run("COMMIT")
            except BaseException:
                with suppress(IndexFault):
                    if self._connection.in_transaction:
                        self.run("ROLLBACK")
                raise

    def close(self) -> None:
        with self.lock, _BOUNDARY:
            self._connection.close()


def _check(row: tuple[Any, ...], columns: tuple[Column, ...]) -> None:
    if not all(test(value) for test, value in zip(columns, row, strict=True)):
        raise IndexDamaged("a row holds a value that the store never writes")


def _printable(words: str) -> str:
    """Replace unprintable characters by `?`, and cut after 200 characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in words)[:200]


ENTRY = "id, key, position, parent, parent_position, bytes, uses, last_used, priority"
ENTRY_COLUMNS = (is_integer, is_key, is_count, is_integer_or_none, is_count, is_count, is_count, is_real, is_real)


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the snapshot table.

    position, parent_position: in tokens. parent_id: row id of the parent. num_bytes: size of the file. last_used:
    seconds since 1970. priority: see eviction.py.
    """

    key: bytes
    position: int
    parent_id: int | None
    parent_position: int
    num_bytes: int
    uses: int
    last_used: float
    priority: float


def row_id(key: bytes) -> int:
    """Return the id of a key's row: the key's first 8 bytes as an integer."""
    return int.from_bytes(key[:8], "little", signed=True)


def entry_of(row: tuple[Any, ...]) -> Entry:
    """Convert a row of the columns ENTRY. Raises IndexDamaged for values that the store never writes."""
    entry = Entry(*row[1:])
    if row[0] != row_id(entry.key):
        raise IndexDamaged("a row has the id of another key")
    if not (entry.parent_position < entry.position and 1 <= entry.num_bytes <= MAX_FILE_BYTES):
        raise IndexDamaged("a row holds a value that the store never writes")
    return entry


# children: number of rows whose parent is this one. Only a row without children may be evicted; the index `leaves`
# finds the least valuable one. parent: a row id, whether or not that row exists.
SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE models (id INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL UNIQUE, name TEXT NOT NULL)",
    "CREATE TABLE totals (entries INTEGER NOT NULL, bytes INTEGER NOT NULL, clock REAL NOT NULL)",
    "CREATE TABLE in_flight (session TEXT NOT NULL, keys BLOB NOT NULL, bytes INTEGER NOT NULL)",
    """CREATE TABLE snapshots (
        id INTEGER PRIMARY KEY, key BLOB NOT NULL, model INTEGER NOT NULL, position INTEGER NOT NULL,
        parent INTEGER, parent_position INTEGER NOT NULL, chained INTEGER NOT NULL, bytes INTEGER NOT NULL,
        children INTEGER NOT NULL, created REAL NOT NULL, last_used REAL NOT NULL, uses INTEGER NOT NULL,
        priority REAL NOT NULL)""",
    "CREATE INDEX leaves ON snapshots (priority, last_used) WHERE children = 0",
    "CREATE INDEX by_parent ON snapshots (parent) WHERE parent IS NOT NULL",
    """CREATE TRIGGER added AFTER INSERT ON snapshots BEGIN
        UPDATE totals SET entries = entries + 1, bytes = bytes + NEW.bytes;
        UPDATE snapshots SET children = children + 1 WHERE id = NEW.parent; END""",
    """CREATE TRIGGER removed AFTER DELETE ON snapshots BEGIN
        UPDATE totals SET entries = entries - 1, bytes = bytes - OLD.bytes;
        UPDATE snapshots SET children = children - 1 WHERE id = OLD.parent; END""",
    "INSERT INTO totals VALUES (0, 0, 0.0)",
    f"INSERT INTO meta VALUES ('format_version', {FORMAT_VERSION})",
)
