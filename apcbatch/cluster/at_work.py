"""AtWork: which requests a worker's engine is at, in a file that outlives the process.

Must not know: engines, units, who reads it. A message that was sent just before a crash may never arrive; what was
written to a file is still there. Invariant: a request is in the file before anything of it is computed.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PLACE = struct.Struct("<q")  # a request's number and 1; 0 for nobody
MOST_BYTES = 1 << 20
PREFIX = "apcbatch-at-work-"
OLD_S = 86400.0  # of a file that nobody has read: both its worker and whoever would read it were killed


class AtWork:
    """The numbers of the requests that are at work. path: of the file, which is made; None for none."""

    def __init__(self, path: str | None) -> None:
        self._file = -1 if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._places: dict[int, int] = {}  # by number
        self._free: list[int] = []

    def begin(self, number: int) -> None:
        """Something of a request is about to be done."""
        if number not in self._places:
            place = self._places[number] = self._free.pop() if self._free else len(self._places)
            self._write(place, number + 1)

    def end(self, number: int) -> None:
        """Nothing more of it will be done."""
        place = self._places.pop(number, None)
        if place is not None:
            self._free.append(place)
            self._write(place, 0)

    def _write(self, place: int, value: int) -> None:
        if self._file >= 0:
            with suppress(OSError):  # no room: who is to blame will not be known
                os.pwrite(self._file, PLACE.pack(value), place * PLACE.size)


def make_file() -> str:
    """The path of a new file in the temporary folder; old ones there that were left behind go."""
    for one in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - one.stat().st_mtime > OLD_S:
                one.unlink()
    file, path = tempfile.mkstemp(prefix=PREFIX)
    os.close(file)
    return path


def read_at_work(path: str) -> frozenset[int] | None:
    """The numbers in a file; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES)
    except OSError:
        return None
    values = [value for (value,) in PLACE.iter_unpack(data[: len(data) // PLACE.size * PLACE.size])]
    return frozenset(value - 1 for value in values if value > 0)
