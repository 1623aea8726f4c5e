"""What tells the lines of the input apart: ids, each of which belongs to one line, and the content of lines without.

Must not know: turns, prompts. Memory: about 30 bytes per id, and as much per line that has no id and draws.
"""

from __future__ import annotations

import json
from typing import Any

from apcbatch.errors import RequestError
from apcbatch.job.keys import KeyTable, id_key


class UsedIds:
    """Every custom_id seen so far, with the first line that used it."""

    def __init__(self) -> None:
        self._lines = KeyTable()

    def enter(self, custom_id: str, line: int) -> RequestError | None:
        """Note the id of a request; the error `duplicate_id` if it is there already."""
        key = id_key(custom_id)
        if self._lines.add(key, line):
            return None
        first = self._lines.get(key)
        return RequestError("duplicate_id", f"id {custom_id!r} was used by line {first}; expected each id once")


class EqualLines:
    """How often each content was seen so far, whatever the order of its keys."""

    def __init__(self) -> None:
        self._counts = KeyTable()

    def enter(self, record: dict[str, Any]) -> tuple[str, int]:
        """Note a parsed line: the digest of its content, and how many lines before it have the same."""
        key = id_key(json.dumps(record, sort_keys=True, default=ascii))
        count = self._counts.get(key) or 0
        if not self._counts.add(key, 1):
            self._counts.set(key, count + 1)
        return f"{key:024x}", count
