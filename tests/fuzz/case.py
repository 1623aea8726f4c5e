"""One case: a folder to itself, command lines to run there, and what must hold of their outcomes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import orjson
from pydantic import ValidationError

import apcbatch
from tests.fuzz.child import Fault, Outcome, call
from tests.openai_types import parsed

DEMO = Path(apcbatch.__file__).parent / "demo"
RECORD_KEYS = {"id", "custom_id", "line", "turn", "response", "error", "apcbatch"}


class Case:
    """What a target works with. draw: all its choices come from it, so a seed repeats the case."""

    def __init__(self, folder: Path, draw: Random, stock: Path, patience: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.draw, self.stock = folder, draw, stock
        self.commands: list[Sequence[str]] = []
        self._patience = patience

    def write(self, name: str, data: bytes) -> Path:
        """A file in the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def model(self, changed: dict[str, bytes | None]) -> str:
        """The demo's folder with some files replaced, or left out (None); the name to give as --model."""
        folder = self.folder / "model"
        folder.mkdir()
        for path in DEMO.iterdir():
            if path.is_file() and path.name not in changed and not path.name.startswith("__"):
                link_or_copy(path, folder / path.name)
        for name, data in changed.items():
            if data is not None:
                (folder / name).write_bytes(data)
        return "model"

    def run(self, *arguments: str, expect: Sequence[int] = (0, 1, 2, 3)) -> Outcome:
        """Run `apcbatch` with these arguments; Fault where a promise is broken or the exit code is another one."""
        self.commands.append(arguments)
        outcome = call(arguments, self.folder, self._patience)
        if outcome.code not in expect:
            raise Fault(f"exit code {outcome.code}, expected one of {tuple(expect)}\nstderr: {outcome.stderr[-1500:]}")
        if outcome.code == 2 and "apcbatch: " not in outcome.stderr and "Error: " not in outcome.stderr:
            raise Fault(f"exit code 2 without a sentence\nstderr: {outcome.stderr[-1500:]}")
        return outcome

    def records(self, name: str = "out.jsonl") -> list[dict[str, Any]]:
        """The lines of an OUT, each checked to be one; none where there is no OUT."""
        path = self.folder / name
        if not path.exists():
            return []
        records = []
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                raise Fault(f"{name} ends in a torn line: {line[-80:]!r}")
            record = orjson.loads(line)
            if not record.keys() >= RECORD_KEYS or (record["error"] is None) == (record["response"] is None):
                raise Fault(f"not a record: {line[:300]!r}")
            if record["error"] is not None and record["error"]["code"] == "internal":
                raise Fault(f"internal error: {record['error']['message']}")
            if record["response"] is not None:
                try:
                    parsed(record)
                except (AssertionError, ValidationError) as error:
                    raise Fault(f"not a response of OpenAI's: {error}") from None
            records.append(record)
        ids = [record["id"] for record in records]
        if len(ids) != len(set(ids)):
            raise Fault(f"{name} answers a request twice")
        return records

    def answered_lines(self, data: bytes, code: int) -> None:
        """Every line that is not blank has a record, where the run says that it finished."""
        if code not in (0, 3) or data.lstrip().startswith(b"["):  # an array: its records count, and not its lines
            return
        expected = {number for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()}
        missing = expected - {record["line"] for record in self.records()}
        if missing:
            raise Fault(f"exit code {code}, but no record of line {min(missing)}")


def link_or_copy(source: Path, target: Path) -> None:
    """The same file under another name, without a copy where the system can; nothing here writes to either."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def answers(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What must not depend on any cache, by request."""
    return {
        record["id"]: record["error"] or (record["apcbatch"]["completion_token_ids"], record["custom_id"])
        for record in records
    }
