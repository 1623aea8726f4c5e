"""Database: one connection to an SQLite file of which no byte is trusted.

Must not know: what the tables mean. This is the one place that calls sqlite3: whatever it raises, and
whatever it returns that is not of the type asked for, becomes an IndexFault. So a damaged file is one kind of
error, wherever the damage is, and its callers need no other.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any
from urllib.parse import quote

from apcbatch.store.format import KEY_BYTES

BUSY_TIMEOUT_S = 10.0

Column = Callable[[Any], bool]
"""Whether a value is what a column holds."""

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
"""What SQLite says where the file may be sound and the system refuses. (Python before 3.11 has no codes.)"""


class IndexFault(Exception):
    """Something about the index file; the text is a clause that says what."""


class IndexUnavailable(IndexFault):
    """The system refuses for now: a lock, a full disk, missing rights. The file may be sound."""


class IndexDamaged(IndexFault):
    """The file holds something that the store never writes."""


class _Boundary:
    """Turns every error of sqlite3 into an IndexFault; its texts may hold any bytes of the file, so they can
    be UnicodeDecodeErrors as well."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """One connection; its methods may be called from any thread. Raises IndexFault and nothing else."""

    def __init__(self, path: str, mode: str) -> None:
        """mode: rwc (create), ro (read only) or immutable (read only, on a medium where nobody can write)."""
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
            self._connection.text_factory = _decode
        try:
            self.run("PRAGMA trusted_schema = OFF")
            self.run("PRAGMA cache_size = -16000")
        except BaseException:
            self.close()
            raise

    def run(self, statement: str, values: Values = ()) -> int:
        """Run one statement that returns no rows; returns how many rows it changed."""
        with self.lock, _BOUNDARY:
            return self._connection.execute(statement, values).rowcount

    def rows(self, statement: str, values: Values, *columns: Column) -> list[tuple[Any, ...]]:
        """All rows, of which each value passed its column's test."""
        with self.lock, _BOUNDARY:
            rows = self._connection.execute(statement, values).fetchall()
        for row in rows:
            _check(row, columns)
        return rows

    def untested(self, statement: str, values: Values) -> set[Any]:
        """What is in the first column, of whatever type: for a caller that compares thousands of keys with
        those that it knows."""
        with self.lock, _BOUNDARY:
            return {row[0] for row in self._connection.execute(statement, values)}

    def row(self, statement: str, values: Values, *columns: Column) -> tuple[Any, ...]:
        """The only row of a statement that has exactly one."""
        rows = self.rows(statement, values, *columns)
        if len(rows) != 1:
            raise IndexDamaged(f"it has {len(rows)} rows where there is one")
        return rows[0]

    def each(self, statement: str, values: Values, *columns: Column) -> Iterator[tuple[Any, ...]]:
        """The rows one by one, for a caller that stops early and holds the lock."""
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
        """Let statements call a function of one argument."""
        with _BOUNDARY:
            self._connection.create_function(name, 1, function, deterministic=True)

    @contextmanager
    def transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        """Everything inside becomes visible to every process at once, or never."""
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


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _printable(words: str) -> str:
    """Without what a terminal would obey or a line would end at."""
    return "".join(letter if letter.isprintable() else "?" for letter in words)[:200]
