"""Read and write OUT.trace.jsonl, the record of how OUT was made, for `apcbatch report`.

It has one line per segment (see segment.py): the first run, and each --resume. Invariants: the path always holds a
complete file, the old or the new one; a file has at most MAX_BYTES, and the oldest segments are dropped first; a file
that is no trace, or that another program writes during the run, is never replaced; a trace has the permissions of OUT.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from apcbatch.data.input.inputs import TRACE_SUFFIX
from apcbatch.errors import UsageError
from apcbatch.job.disk import Disk, identity, write_file
from apcbatch.job.tracing.segment import FORMAT, Segment, is_count, is_segment, line_of, parsed, segment_of
from apcbatch.regular_files import read_regular_file

MAX_BYTES = 8 << 20


class TraceError(Exception):
    """Raised for a trace that cannot be read; its text is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Segments of a trace file, oldest first, and a sentence for each missing part."""

    segments: list[Segment]
    notes: list[str]


def trace_path(output: str) -> str:
    """Return the path of an OUT's trace: beside the file that OUT leads to, with each link followed."""
    return os.path.realpath(os.path.realpath(output) + TRACE_SUFFIX)


def read_trace(path: str | Path) -> Trace:
    """Read the trace in a file; TraceError if there is none, or if no segment of it can be read."""
    try:
        lines = _lines(path)
    except FileNotFoundError:
        raise TraceError(f"{path} is missing; `apcbatch run` writes it, unless --no-trace is given") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    if not any(map(is_segment, lines)):
        raise TraceError(f"{path} is not a trace of this program")
    segments, notes = [], []
    for number, line in enumerate(lines, start=1):
        try:
            found = parsed(line)
            if found["format"] != FORMAT:
                raise ValueError(f"it has the format {str(found['format'])[:20]}; this version reads {FORMAT}")
            segments.append(segment_of(found["segment"]))
            missing = found.get("missing", 0)
        except (ValueError, LookupError, TypeError) as error:
            reason = f"it has no {error.args[0]}" if isinstance(error, KeyError) else error
            notes.append(f"segment {number} of {path} cannot be read: {reason}")
        else:
            if is_count(missing) and missing:
                notes.append(
                    f"{path} had {missing} older segments, which were dropped to stay below {MAX_BYTES:,} bytes"
                )
    if not segments:
        raise TraceError(notes[0])
    return Trace(segments, notes)


class TraceFile:
    """Trace beside one OUT, to which one process adds its segment. like: file whose permissions the trace gets."""

    def __init__(self, output: Path, like: Path, disk: Disk) -> None:
        self.path = Path(trace_path(str(output)))
        self._like, self._disk = like, disk
        self._earlier: list[bytes] = []
        self._own = identity(self.path)

    def check_replaceable(self) -> None:
        """Refuse to replace a file that is not a trace."""
        if os.path.lexists(self.path) and not self.is_ours():
            raise UsageError(
                f"{self.path} is not a trace of this program, and this run would replace it; move it away, choose "
                "another -o, or give --no-trace"
            )

    def is_ours(self) -> bool:
        """Return whether the file that is there now is a trace, of any version."""
        try:
            return any(map(is_segment, _lines(self.path)))
        except OSError:
            return False

    def keep_earlier(self, warn: Callable[[str], None]) -> None:
        """Keep the segments that the file has, unchanged. warn: called if other lines are dropped."""
        try:
            lines = _lines(self.path)
        except OSError:
            return  # there is no trace yet
        self._earlier = [line for line in lines if is_segment(line)]
        if len(self._earlier) < len(lines):
            warn(f"{len(lines) - len(self._earlier)} lines of {self.path} are no segments of a trace; they are dropped")

    def write(self, segment: Segment) -> None:
        """Rewrite the file: first the latest of the earlier segments, as many as fit, then this segment. Raises
        OSError."""
        if (found := identity(self.path)) is not None and found != self._own:
            raise FileExistsError(errno.EEXIST, "another program has put a file there while this run went on")
        missing, room = 0, MAX_BYTES - len(line_of(segment, len(self._earlier)))
        for line in reversed(self._earlier):
            room -= len(line) + 1
            missing += room < 0
        kept = self._earlier[missing:]
        write_file(
            str(self.path), [*(line + b"\n" for line in kept), line_of(segment, missing)], self._disk, self._like
        )
        self._own = identity(self.path)

    def remove(self) -> None:
        """Remove the trace of an OUT that a fresh run replaces. A file that is no trace stays."""
        if not self.is_ours():
            return
        try:
            self._disk.unlink(str(self.path))
        except OSError as error:
            raise UsageError(f"{self.path} cannot be removed: {error.strerror}; choose another -o") from None
        self._disk.sync_folder(str(self.path.parent))


def _lines(path: str | Path) -> list[bytes]:
    return read_regular_file(path, MAX_BYTES).splitlines()
