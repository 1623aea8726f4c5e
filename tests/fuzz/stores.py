"""Targets around the store: rows and bytes of its index, and its snapshot files. Answers never change."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.fuzz.case import Case, answers
from tests.fuzz.child import Fault
from tests.fuzz.inputs import CONVERSATION, RUN
from tests.fuzz.mutate import NUMBERS, TEXTS, dump_json, mutate_bytes

INDEX = "index.sqlite"
LIMIT_BYTES = 1 << 20
NEWER = "use a newer apcbatch"


def stock_store(folder: Path, case: Case) -> None:
    """Make, once, an input, a store of it, and the answers that every case must give."""
    turns = [dict(message) for message in CONVERSATION["messages"][:2]]
    lines = []
    for number in range(6):
        asked = {
            "role": "user",
            "content": f"Question {number}: " + "tell me more about order A-17. " * (3 + number),
        }
        lines.append({"id": f"q-{number}", "messages": [*turns, asked]})
    case.write("in.jsonl", b"".join(dump_json(line) + b"\n" for line in lines))
    case.run(*RUN, "in.jsonl", *SETTINGS, "--no-store", "--policy", "none", expect=(0,))
    shutil.move(case.folder / "out.jsonl", case.folder / "cold.jsonl")
    os.unlink(case.folder / "out.jsonl.run.json")
    case.run(*RUN, "in.jsonl", *SETTINGS, "--store", "kept", "--store-size", str(LIMIT_BYTES), expect=(0,))
    case.run(
        *RUN,
        "in.jsonl",
        *SETTINGS,
        "--store",
        "kept",
        "--store-size",
        str(LIMIT_BYTES),
        "--overwrite",
        expect=(0,),
    )
    shutil.copytree(case.folder, folder)


SETTINGS = ("--dtype", "float32", "--max-tokens", "2", "--block-size", "16", "--policy", "all")


def _store(case: Case) -> Path:
    for name in ("in.jsonl", "cold.jsonl"):
        shutil.copyfile(case.stock / name, case.folder / name)
    shutil.copytree(case.stock / "kept", case.folder / "kept")
    return case.folder / "kept"


def _same_answers(case: Case) -> None:
    """Run on the damaged store, twice, and look after it: no answer differs, the limit holds."""
    expected = answers(case.records("cold.jsonl"))
    size = case.draw.choice((LIMIT_BYTES, 100_000, 0))
    for _ in range(2):
        options = ("--store", "kept", "--store-size", str(size), "--overwrite")
        outcome = case.run(*RUN, "in.jsonl", *SETTINGS, *options, expect=(0, 2))
        if outcome.code == 2 and NEWER in outcome.stderr:
            return  # a number that only a later version can have written: refused, and nothing is touched
        if outcome.code == 2:
            raise Fault(f"a damaged store ended the run\nstderr: {outcome.stderr}")
        if answers(case.records()) != expected:
            raise Fault("an answer differs from the run without a store")
    command = case.draw.choice((("stat",), ("check",), ("prune", "--size", "0"), ("prune", "--older-than", "1s")))
    case.run("store", command[0], "kept", *command[1:], expect=(0, 1, 2))
    files = (case.folder / "kept" / "objects").rglob("*.safetensors")
    held = sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())
    if held > LIMIT_BYTES:
        raise Fault(f"the store holds {held} bytes of snapshots; the limit is {LIMIT_BYTES}")


def fuzz_index_bytes(case: Case) -> None:
    """Bytes of the index's file changed anywhere, or its log's."""
    folder = _store(case)
    path = folder / INDEX
    path.write_bytes(mutate_bytes(case.draw, path.read_bytes(), case.draw.randint(1, 3)))
    _same_answers(case)


def fuzz_index_rows(case: Case) -> None:
    """Values of rows replaced by others of any type, rows dropped or made up; the database itself stays sound."""
    draw = case.draw
    with closing(sqlite3.connect(_store(case) / INDEX)) as db:
        for _ in range(draw.randint(1, 4)):
            table = draw.choice(("meta", "models", "totals", "in_flight", "snapshots", "snapshots", "snapshots"))
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            value = draw.choice((None, *NUMBERS[:-3], *TEXTS, b"", b"\0" * 32, os.urandom(0), draw.randbytes(32)))
            if isinstance(value, int) and not -(2**63) <= value < 2**63 or isinstance(value, str) and "\ud800" in value:
                value = str(value).encode("utf-8", "surrogatepass")
            rows = [row for (row,) in db.execute(f"SELECT rowid FROM {table}")] if table != "meta" else []
            where = f" WHERE rowid = {draw.choice(rows)}" if rows and draw.randrange(3) else ""
            try:
                if draw.randrange(6) == 0:
                    db.execute(f"DELETE FROM {table}{where}")
                elif table == "in_flight":
                    db.execute(
                        "INSERT INTO in_flight VALUES (?, ?, ?)",
                        [draw.choice((value, "a" * 32, b"x" * 64, 7)) for _ in columns],
                    )
                else:
                    db.execute(f"UPDATE {table} SET {draw.choice(columns)} = ?{where}", (value,))
            except sqlite3.Error:
                continue
        db.commit()
    _same_answers(case)


def fuzz_index_schema(case: Case) -> None:
    """The text of a table, an index or a trigger changed inside the database."""
    draw = case.draw
    with closing(sqlite3.connect(_store(case) / INDEX)) as db:
        db.execute("PRAGMA writable_schema = ON")
        name, sql = draw.choice(db.execute("SELECT name, sql FROM sqlite_master WHERE sql NOT NULL").fetchall())
        changed = mutate_bytes(draw, sql.encode(), draw.randint(1, 2))
        db.execute("UPDATE sqlite_master SET sql = CAST(? AS TEXT) WHERE name = ?", (changed, name))
        db.commit()
    _same_answers(case)


def fuzz_snapshots(case: Case) -> None:
    """Snapshot files with other bytes, cut short, exchanged, or replaced by something that is no file."""
    draw = case.draw
    files = sorted((_store(case) / "objects").rglob("*.safetensors"))
    for path in draw.sample(files, min(len(files), draw.randint(1, 4))):
        kind = draw.randrange(6)
        data = path.read_bytes()
        path.unlink()
        if kind <= 2:
            path.write_bytes(mutate_bytes(draw, data, draw.randint(1, 2)))
        elif kind == 3:
            other = draw.choice(files)
            path.write_bytes(other.read_bytes() if other.is_file() else b"")
        elif kind == 4:
            draw.choice((os.mkfifo, os.mkdir))(path)
        else:
            path.symlink_to(draw.choice((case.stock / "in.jsonl", Path("nowhere"), path.name)))
    _same_answers(case)
