"""Compare an INPUT that may have changed with the answers in OUT: what stays, what is made again, what lost its line.

The comparison reads INPUT once, before anything in OUT changes. A line is corrected if OUT has a record of it that was
made from other content; such records are dropped. It is new if OUT has no record of it. A record whose line is gone
stays if it is an answer, and is dropped if it is an error.

A line without an id is known by its content alone, so a corrected one looks like a line that is gone and a new one. The
two are one corrected line if the new one stands where the other one would: its earlier line, shifted as the nearest
kept line before it is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from apcbatch.display import counted
from apcbatch.job.keys import KeyTable, id_key
from apcbatch.job.record import Ticket, record_number

MOST_LINES = 1 << 60
MOST_MOVED = 10_000  # stretches in the run file; about 300 KB

Stretch = tuple[int, int, int]


class MovedLines:
    """Distance between the line in a record and its line in INPUT, by the record's number. stretches: (first number,
    last number, distance in lines); numbers in none of them have the distance 0."""

    def __init__(self, stretches: Iterable[Stretch] = ()) -> None:
        self.stretches = list(stretches)
        self._sorted = sorted(self.stretches)

    def distance(self, number: int) -> int:
        """Return the distance of a record, in lines."""
        at = bisect_right(self._sorted, (number, 1 << 63, 0)) - 1
        return self._sorted[at][2] if at >= 0 and number <= self._sorted[at][1] else 0


class InputChanges:
    """Result of comparing INPUT with OUT, collected line by line.

    moved: distances of the previous comparison. dropped: byte offsets of the records to drop from OUT, sorted once
    `end` was called. num_without_line: answers that stay although their line is gone. stretches: the distances now,
    as in MovedLines; None if there are more than MOST_MOVED. is_done: the whole comparison is made.
    """

    def __init__(self, moved: MovedLines | None = None) -> None:
        self._moved = moved or MovedLines()
        self._lines = KeyTable()  # first id of each line -> line
        self._new, self._corrected = array("q"), array("q")  # lines, ascending
        self._gone: set[int] = set()  # earlier lines
        self._replaced: set[int] = set()  # lines whose earlier records were of no request
        self._before, self._shifts = array("q"), array("q")  # earlier line -> shift, where it changes
        self._is_known = True  # OUT has a record of the current line
        self._num_dropped = 0  # answers
        self._line = 0
        self.dropped = array("q")
        self.num_without_line = 0
        self.stretches: list[Stretch] | None = []
        self.is_done = False

    def begin_line(self, line: int, first_id: str | None) -> None:
        """Begin a line of INPUT. first_id: custom_id of its first request; None if no id identifies the line."""
        self._end_line()
        self._line, self._is_known = line, False
        if first_id is not None:
            self._lines.add(id_key(first_id), line)

    def keep(self, record: dict[str, Any], ticket: Ticket) -> None:
        """Note that a record answers a request of the current line."""
        self._is_known = True
        number = record_number(record)
        before = self._earlier_line(record)
        if not self._shifts or self._shifts[-1] != ticket.line - before:
            self._before.append(before)
            self._shifts.append(ticket.line - before)
        distance = ticket.line - record["line"]
        if not distance or self.stretches is None:
            return
        if self.stretches and self.stretches[-1][1:] == (number - 1, distance):
            self.stretches[-1] = (self.stretches[-1][0], number, distance)
        elif len(self.stretches) < MOST_MOVED:
            self.stretches.append((number, number, distance))
        else:
            self.stretches = None

    def correct(self, offset: int, is_answer: bool) -> None:
        """Drop a record, an answer or an error, that was made from other content of the current line."""
        self._is_known = True
        self._num_dropped += is_answer
        self.dropped.append(offset)
        if not self._corrected or self._corrected[-1] != self._line:
            self._corrected.append(self._line)

    def end_input(self) -> None:
        """End the last line: INPUT is read to its end."""
        self._end_line()
        order = np.argsort(np.array(self._before), kind="stable")
        self._before, self._shifts = (array("q", np.array(one)[order]) for one in (self._before, self._shifts))

    def settle(self, offset: int, record: dict[str, Any]) -> bool:
        """Return whether a record of no request stays in OUT, once INPUT is read to its end."""
        earlier_line = self._earlier_line(record)
        has_id, is_error = record["apcbatch"].get("line_key") is None, record["error"] is not None
        line = self._lines.get(id_key(_first_id(record))) if has_id or is_error else None
        if line is None and not has_id:
            at = bisect_right(self._before, earlier_line) - 1
            line = earlier_line + (self._shifts[at] if at >= 0 else 0)
            line = line if _has(self._new, line) else None
        if line is None:
            self._gone.add(earlier_line)
        else:
            self._replaced.add(line)
        if line is None and not is_error:
            self.num_without_line += 1
            return True
        self._num_dropped += not is_error
        self.dropped.append(offset)
        return False

    def end(self) -> None:
        """End the comparison."""
        self.dropped = array("q", sorted(self.dropped))
        self._new = array("q", (line for line in self._new if line not in self._replaced))
        self._replaced.update(self._corrected)
        self._lines, self.is_done = KeyTable(), True

    def drops(self, offset: int) -> bool:
        """Return whether the record at a byte offset is dropped."""
        return _has(self.dropped, offset)

    @property
    def is_another_input(self) -> bool:
        """Whether no answer in OUT is of a line as it is now, and the answers of several lines would be dropped."""
        return not self._before and self._num_dropped > 0 and len(self._replaced) > 1

    @property
    def has_corrections(self) -> bool:
        """Whether OUT had records of corrected lines."""
        return bool(self._replaced)

    def sentence(self) -> str:
        """Return the numbers of lines: corrected, new, gone."""
        if not (self._replaced or self._new or self._gone):
            return "INPUT has changed: no line is corrected, new or gone"
        corrected = counted(len(self._replaced), "line")
        return f"INPUT has changed: {corrected} corrected, {len(self._new):,} new, {len(self._gone):,} gone"

    def _earlier_line(self, record: dict[str, Any]) -> int:
        """Return the line of a record in the INPUT that was compared before."""
        line: int = record["line"] + self._moved.distance(record_number(record))
        return min(line, MOST_LINES)

    def _end_line(self) -> None:
        if not self._is_known:
            self._new.append(self._line)
        self._is_known = True


def _first_id(record: dict[str, Any]) -> str:
    """Return the custom_id of the first request of a record's line, which has an id."""
    conversation, custom_id = record["apcbatch"].get("conversation"), record["custom_id"]
    return custom_id or "" if conversation in (None, custom_id) else f"{conversation}#1"


def _has(ascending: Sequence[int], value: int) -> bool:
    at = bisect_left(ascending, value)
    return at < len(ascending) and ascending[at] == value
