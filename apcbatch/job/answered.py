"""What OUT answers already: read once when a run resumes, asked for every request.

Must not know: prompts, the engine. Memory: 36 to 54 bytes a finished request.
"""

from __future__ import annotations

from typing import Any

import orjson

from apcbatch.errors import UsageError
from apcbatch.job.keys import KeyTable, request_key
from apcbatch.job.record import Ticket
from apcbatch.job.sink import FileSink


class Answered:
    """The requests that have a line in OUT; none for a fresh run."""

    def __init__(self, sink: FileSink | None = None) -> None:
        self._sink = sink
        self._offsets = KeyTable(with_values=True)
        self.num_errors = self.num_retryable = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, ticket: Ticket) -> bool:
        return _key(ticket.line, ticket.turn) in self._offsets

    def record(self, ticket: Ticket) -> dict[str, Any] | None:
        """The record of a request, read back from OUT; None where there is none."""
        offset = self._offsets.get(_key(ticket.line, ticket.turn))
        return None if offset is None or self._sink is None else orjson.loads(self._sink.line_at(offset))

    def _enter(self, offset: int, record: dict[str, Any]) -> None:
        self._offsets.add(_key(record["line"], record["turn"]), offset)
        if record["error"] is not None:
            self.num_errors += 1
            self.num_retryable += bool(record["error"]["retryable"])


def read_answered(sink: FileSink, retry_errors: bool) -> Answered:
    """Cut a torn end off OUT, drop the errors that are to be run again, and read which requests are left."""
    sink.cut_torn_line()
    if retry_errors:
        sink.keep(lambda line: not _is_retryable(line))
    answered = Answered(sink)
    for number, (offset, line) in enumerate(sink.lines(), start=1):
        record = _parse(line)
        if record is None:
            raise UsageError(
                f"output {sink.path}, line {number}, is not a line that this program wrote; "
                "take it out, or choose another -o, or --overwrite"
            )
        answered._enter(offset, record)
    return answered


def _key(line: int, turn: int | None) -> int:
    return request_key(line, turn or 0)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line, None where it is something else."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    known = isinstance(record, dict) and {"id", "line", "turn", "error", "response"} <= record.keys()
    return (
        record
        if known and isinstance(record["line"], int) and isinstance(record["turn"], int | None)
        else None
    )


def _is_retryable(line: bytes) -> bool:
    record = _parse(line)
    return record is not None and record["error"] is not None and bool(record["error"]["retryable"])
