"""Find and read the lines of an OUT, finished or not. Nothing is written.

Invariant: memory does not grow with the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from apcbatch.address import is_address, last_part, shown_address
from apcbatch.data.input.files import BROKEN, STDIN, Stream, reason
from apcbatch.data.input.lines import MAX_LINE_BYTES, split_lines
from apcbatch.errors import UsageError
from apcbatch.job.output import output_for
from apcbatch.regular_files import open_regular_file


@dataclass(frozen=True)
class OutFile:
    """Paths of one OUT. name: as the user gave it. target: OUT itself, next to which the run file lies. lines: the
    file to read, `OUT.part` while a compressed OUT is not finished."""

    name: str
    target: str
    lines: str

    @property
    def is_partial(self) -> bool:
        """Whether OUT is still to be compressed, so that its lines are in `OUT.part`."""
        return self.lines != self.target

    def read(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield (number, line) of each line that is not blank, decompressed. The line is None if it is too long to be a
        record. UsageError at the point from which the file is damaged, after the lines before it."""
        number = 0
        try:
            with open_regular_file(self.lines) as raw:
                for number, line in split_lines(Stream(raw).chunks(), MAX_LINE_BYTES):
                    if line != b"":
                        yield number, None if isinstance(line, int) else line
        except BROKEN as error:
            place = f"after line {number}" if number else "before its first line"
            raise UsageError(f"output {self.lines} cannot be read further {place}: {reason(error)}") from None


def find_out(name: str) -> OutFile:
    """Return the OUT of that name; UsageError if it does not exist or is not a file."""
    if name == STDIN:
        raise UsageError("an OUT is read from its file, and - is a stream; give the file's name")
    if is_address(name):
        local = last_part(name) or "OUT"
        raise UsageError(
            f"{shown_address(name)} is not read from its address; its run has left {local} in the folder where it ran, "
            f"with {local}.run.json: give that file, or a copy"
        )
    output = output_for(name)
    place = output.lines if os.path.exists(output.lines) else output.target
    try:
        open_regular_file(place).close()
    except OSError as error:
        raise UsageError(f"output {name} cannot be read: {reason(error)}; give the OUT of `apcbatch run`") from None
    return OutFile(name, output.target, place)
