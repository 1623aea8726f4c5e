"""Records of live episodes in OUT: those that are stale, and the transcript of one.

A record's `apcbatch.attempt` counts how often its episode was begun; those of earlier attempts are stale, and stay in
OUT until the run ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from apcbatch.errors import UsageError
from apcbatch.job.record import read_record
from apcbatch.job.sink import FileSink
from apcbatch.tools import Message


def stale_records(lines: Iterable[tuple[int, bytes]], retry_errors: bool) -> set[int]:
    """Return the byte offsets of stale records; with retry_errors, also of those of episodes that have a retryable
    error. lines: (offset, line) of OUT."""
    found: list[tuple[int, str, int]] = []
    latest: dict[str, int] = {}
    failed: set[str] = set()
    for offset, line in lines:
        record = read_record(line) if b'"attempt":' in line else None
        if record is not None and (attempt := record["apcbatch"].get("attempt")) is not None:
            name = f"{record['apcbatch'].get('line_key')}\0{record['apcbatch'].get('episode')}"
            found.append((offset, name, attempt))
            latest[name] = max(attempt, latest.get(name, 0))
            if retry_errors and record["error"] is not None and record["error"]["retryable"]:
                failed.add(name)
    return {offset for offset, name, attempt in found if attempt < latest[name] or name in failed}


def drop_stale(sink: FileSink) -> None:
    """Remove the stale records from OUT."""
    stale = stale_records(sink.lines(), False)
    if stale:
        sink.keep(lambda offset, line: offset not in stale)


def read_episode(name: str, lines: Iterable[bytes | None]) -> tuple[list[Message], dict[str, Any]]:
    """Return what OUT has of an episode's latest attempt: the messages behind those of its line, all if it failed, and
    its last record. lines: of OUT. UsageError without such an episode, or if its messages are none."""
    found: dict[int, dict[str, Any]] = {}
    latest = 0
    for line in lines:
        record = read_record(line) if line is not None and b'"episode":' in line else None
        if record is None or record["apcbatch"].get("episode") != name or record["turn"] is None:
            continue
        attempt = record["apcbatch"].get("attempt", 0)
        if attempt > latest:
            found, latest = {}, attempt
        if attempt == latest:
            found[record["turn"]] = record
    if not found:
        raise UsageError(f"OUT has no episode {name!r}; give the custom_id of a record without its #TURN")
    last = found[max(found)]
    messages: Any = []
    if last["error"] is not None:
        messages = last["apcbatch"].get("transcript")
    else:
        for _, record in sorted(found.items()):
            appended = record["apcbatch"].get("appended")
            messages += [record["response"]["body"]["choices"][0].get("message"), *(appended or ())]
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise UsageError(f"the records of episode {name!r} are not as this program writes them")
    return messages, last
