"""What an incident is made of: log lines and metrics from patterns and seeded draws, and hypotheses.

Must not know: the order in which a conversation looks at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any


def stamp(seconds: int) -> str:
    """Seconds after midnight as HH:MM:SS."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


@dataclass(frozen=True)
class Logs:
    """What a service wrote: patterns with how often each comes, and one decisive line near the end.

    A pattern may use {ms}, {id}, {user}, {n} and {conn}.
    """

    service: str
    level: str
    patterns: tuple[str, ...]
    decisive: str = ""
    lines: int = 12
    more: int = 0
    low_ms: int = 20
    high_ms: int = 400

    def as_json(self, start: int, seed: str) -> dict[str, Any]:
        """The answer of the function `logs`, from `start` seconds after midnight."""
        rng = Random(f"{seed} {self.service} {self.level}")
        rows, now = [], start
        for number in range(self.lines):
            now += rng.randrange(1, 9)
            pattern = rng.choice(self.patterns)
            if self.decisive and number == self.lines - 3:
                pattern = self.decisive
            text = pattern.format(
                ms=rng.randrange(self.low_ms, self.high_ms),
                id=f"{rng.getrandbits(24):06x}",
                user=rng.randrange(10000, 99999),
                n=rng.randrange(2, 60),
                conn=rng.randrange(1, 40),
            )
            rows.append(f"{stamp(now)}.{rng.randrange(1000):03d} {self.level.upper()} {text}")
        return {"service": self.service, "level": self.level, "lines": rows, "more": self.more}


@dataclass(frozen=True)
class Metric:
    """One metric: a value that stays, then changes at a minute, with some noise (all in its unit)."""

    service: str
    name: str
    unit: str
    before: float
    after: float
    change_minute: int
    gradual: bool = False
    points: int = 20
    every: int = 2

    def as_json(self, start: int, seed: str) -> dict[str, Any]:
        """The answer of the function `metric`, from `start` minutes after midnight."""
        rng = Random(f"{seed} {self.service} {self.name}")
        values = {}
        for number in range(self.points):
            minute = start + number * self.every
            value = self.level(minute, start + self.points * self.every)
            noise = 1 + (rng.random() - 0.5) * 0.08
            exact = value * noise
            values[stamp(minute * 60)[:5]] = round(exact, 1) if value < 100 else round(exact)
        return {"service": self.service, "metric": self.name, "unit": self.unit, "values": values}

    def level(self, minute: int, end: int) -> float:
        """The value without noise."""
        if minute < self.change_minute:
            return self.before
        if not self.gradual:
            return self.after
        share = (minute - self.change_minute) / max(1, end - self.change_minute)
        return self.before + (self.after - self.before) * share


@dataclass(frozen=True)
class Deploy:
    """One entry of the pipeline."""

    at: str
    service: str
    version: str
    change: str

    def as_json(self) -> dict[str, str]:
        """The entry as the function `deploys` shows it."""
        return {"at": self.at, "service": self.service, "version": self.version, "change": self.change}


@dataclass(frozen=True)
class Look:
    """One deeper test of a hypothesis: what is looked at, why, and what it decides."""

    reason: str
    what: Logs | Metric | tuple[Deploy, ...]
    finding: str


@dataclass(frozen=True)
class Hypothesis:
    """A conceivable cause: what one would see, the first test, its finding, and two ways to go on."""

    title: str
    expect: str
    ruled_out: str
    first: Logs
    second: Metric
    finding: str
    looks: tuple[Look, Look]


@dataclass(frozen=True)
class Incident:
    """An alert with the errors and the metric behind it, and the summary at the end. Times are in minutes."""

    name: str
    start: int
    alert: str
    platform: str
    errors: Logs
    metric: Metric
    hypotheses: tuple[Hypothesis, Hypothesis]
    others: tuple[str, ...]
    summary: str
