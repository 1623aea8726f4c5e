"""The ids that the input has used: an id belongs to one line.

Must not know: turns, prompts. Memory: about 30 bytes per id.
"""

from __future__ import annotations

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
