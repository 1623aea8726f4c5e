"""One reading, and files of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Reading:
    """The level in centimetres at a time."""

    time: datetime
    level: float


def parse_time(text: str) -> datetime:
    """A time in ISO 8601."""
    if text.endswith("Z"):
        text = text[:-1] + "+00:00"
    return datetime.fromisoformat(text)


def read(lines: Iterable[str]) -> Iterator[Reading]:
    """The readings of a file; everything after a # is a comment."""
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        parts = text.split()
        if len(parts) != 2:
            raise ValueError(f"line {number}: expected a time and a level, got {text!r}")
        yield Reading(parse_time(parts[0]), float(parts[1]))
