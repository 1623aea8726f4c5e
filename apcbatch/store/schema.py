"""Schema: the tables of the index file. docs/store-format.md describes them.

Must not know: who asks what of them.
"""

from __future__ import annotations

from apcbatch.store.format import FORMAT_VERSION

# children counts the rows whose parent is this one; only a row without children may be evicted, and `leaves`
# finds the least valuable one. parent is a row id, whether or not that row exists.
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
