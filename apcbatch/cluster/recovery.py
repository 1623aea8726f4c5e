"""Recovery of a lost worker's requests, and the file in which a worker records its requests in flight.

Invariants:
- Only requests that were in flight are suspected of ending the worker.
- A suspect is retried alone on a worker.
- A request fails only if it ends a second worker while it runs alone.

So a request that crashes workers ends two of them, and no other request fails with it.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from apcbatch.cluster.tasks import Group, Item
from apcbatch.errors import RequestError
from apcbatch.types import Result

MOST_DEATHS = 2


def recover(units: Iterable[list[Item]], in_flight: Collection[int] | None) -> tuple[list[Item], list[Group]]:
    """Decide which unfinished requests of a lost worker fail, and in which groups the others run again.

    units: the requests of each unit, in the plan's order. in_flight: numbers of the requests that the worker was
    computing; None if unknown, which makes all of them suspects.
    """
    failed, groups, suspects = list[Item](), list[Group](), list[Item]()
    for items in units:
        suspected = [item for item in items if in_flight is None or item.number in in_flight]
        suspects += suspected
        if others := [item for item in items if in_flight is not None and item.number not in in_flight]:
            groups.append(Group(others))
    for item in suspects:
        item.deaths += 1
        if len(suspects) == 1 and item.deaths >= MOST_DEATHS:
            failed.append(item)
        else:
            groups.append(Group([item], is_alone=True))
    return failed, groups


def worker_lost(item: Item, reason: str) -> Result:
    """Return the error result of a request that ended several workers. reason: how the last worker ended."""
    message = (
        f"{item.deaths} workers ended while they were at this request, the last one with nothing beside it ({reason}); "
        "the other requests continue. Give the workers more memory and --retry-errors, or leave it out"
    )
    request = item.request
    return Result(id=request.id, prompt_tokens=len(request.token_ids), error=RequestError("worker_lost", message))


SLOT = struct.Struct("<q")  # int64, little-endian: request number plus 1; 0 marks a free slot
MOST_BYTES = 1 << 20
PREFIX = "apcbatch-at-work-"
OLD_S = 86400.0  # a file this old belongs to a killed worker whose driver was killed too


class InFlightFile:
    """File with the numbers of the requests in flight. path: where it is created; None for no file."""

    def __init__(self, path: str | None) -> None:
        self._file = -1 if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._slots: dict[int, int] = {}  # request number -> slot
        self._free: list[int] = []

    def begin(self, number: int) -> None:
        """Record that a request is about to be computed."""
        if number not in self._slots:
            slot = self._slots[number] = self._free.pop() if self._free else len(self._slots)
            self._write(slot, number + 1)

    def end(self, number: int) -> None:
        """Record that a request is no longer being computed."""
        slot = self._slots.pop(number, None)
        if slot is not None:
            self._free.append(slot)
            self._write(slot, 0)

    def _write(self, slot: int, value: int) -> None:
        if self._file >= 0:
            with suppress(OSError):  # such as a full disk: the requests in flight are then unknown
                os.pwrite(self._file, SLOT.pack(value), slot * SLOT.size)


def make_file() -> str:
    """Create an in-flight file in the temporary folder, and return its path. Files older than OLD_S there are
    deleted."""
    for one in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - one.stat().st_mtime > OLD_S:
                one.unlink()
    file, path = tempfile.mkstemp(prefix=PREFIX)
    os.close(file)
    return path


def read_in_flight(path: str) -> frozenset[int] | None:
    """Return the request numbers in a file; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES)
    except OSError:
        return None
    values = [value for (value,) in SLOT.iter_unpack(data[: len(data) // SLOT.size * SLOT.size])]
    return frozenset(value - 1 for value in values if value > 0)
