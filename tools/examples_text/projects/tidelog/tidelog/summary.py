"""A day in one line."""

from collections.abc import Sequence

from tidelog.record import Reading
from tidelog.series import high_waters


def summary(readings: Sequence[Reading]) -> str:
    """Lowest, highest and the times of high water."""
    if not readings:
        return "no readings"
    levels = [reading.level for reading in readings]
    times = ", ".join(reading.time.strftime("%H:%M") for reading in high_waters(readings))
    return f"{min(levels):.0f} to {max(levels):.0f} cm, high water at {times or 'no time'}"
