"""What can be computed from readings that are in order."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise

from tidelog.record import Reading

Span = tuple[datetime, datetime]


def gaps(readings: Sequence[Reading], longest: timedelta, end: datetime | None = None) -> list[Span]:
    """Spans without a reading that are longer than allowed; end is when the record should end."""
    found = []
    for before, after in pairwise(readings):
        if after.time - before.time > longest:
            found.append((before.time, after.time))
    return found


def means(readings: Sequence[Reading], width: timedelta) -> list[Reading]:
    """Mean levels of consecutive spans of this width, each at the start of its span."""
    if not readings:
        return []
    result = []
    start, index = readings[0].time, 0
    while index < len(readings):
        levels = []
        while index < len(readings) and readings[index].time < start + width:
            levels.append(readings[index].level)
            index += 1
        result.append(Reading(start, sum(levels) / len(levels)))
        start += width
    return result


def high_waters(readings: Sequence[Reading]) -> list[Reading]:
    """Readings that are higher than those around them."""
    found = []
    for before, here, after in zip(readings, readings[1:], readings[2:], strict=False):
        if here.level >= before.level and here.level >= after.level:
            found.append(here)
    return found
