"""Entry: one row of the index, as far as anybody asks for it.

Must not know: where the row lies, the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apcbatch.store.database import (
    IndexDamaged,
    is_count,
    is_integer,
    is_integer_or_none,
    is_key,
    is_real,
)
from apcbatch.store.format import MAX_FILE_BYTES

ENTRY = "id, key, position, parent, parent_position, bytes, uses, last_used, priority"
ENTRY_COLUMNS = (
    is_integer,
    is_key,
    is_count,
    is_integer_or_none,
    is_count,
    is_count,
    is_count,
    is_real,
    is_real,
)


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


def row_id(key: bytes) -> int:
    """The id of a key's row: its first 8 bytes."""
    return int.from_bytes(key[:8], "little", signed=True)


def entry_of(row: tuple[Any, ...]) -> Entry:
    """A row of ENTRY; raises IndexDamaged for one that the store never writes."""
    entry = Entry(*row[1:])
    if row[0] != row_id(entry.key):
        raise IndexDamaged("a row has the id of another key")
    if not (entry.parent_position < entry.position and 1 <= entry.num_bytes <= MAX_FILE_BYTES):
        raise IndexDamaged("a row holds a value that the store never writes")
    return entry
