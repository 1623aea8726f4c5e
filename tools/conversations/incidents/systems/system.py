"""One of the examples' systems: its services and their ways of writing, and the times of one incident in it.

Must not know: what may be wrong (the modules of the systems hold that) or how it is told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from examples_text.incident_data import Deploy, Logs, Metric, stamp

from conversations.incidents.world import Level, World


@dataclass(frozen=True)
class Trouble:
    """One possible cause, and what is seen of it; `<name>` and `{ms}` are as in the faults of the drawn companies.

    part is the service that shows it, with traces and a decisive line if it is the cause and calm lines if it is not;
    deep_* is the second look, at another log; guilty is the service whose change caused it.
    """

    title: str
    expect: str
    ruled_out: str
    symptoms: tuple[str, ...]
    alarm: Level
    effect: str
    part: str
    level: str
    traces: tuple[str, ...]
    decisive: str
    calm: tuple[str, ...]
    measure: Level
    found: str
    deep_reason: str
    deep_part: str
    deep_level: str
    deep_traces: tuple[str, ...]
    deep_decisive: str
    deep_found: str
    guilty: str
    version: str
    change: str
    mechanism: str
    because: str
    now: str
    tomorrow: str


@dataclass(frozen=True)
class System:
    """Services that call each other, and what can be wrong with them.

    level is the one at which the victim mostly writes its troubles; others are hypotheses in one line; warnings are
    what each service writes on any day; changes are harmless deploys as pairs of service and change.
    """

    victim: str
    level: str
    platform: str
    every: tuple[int, ...]
    others: tuple[str, ...]
    warnings: dict[str, tuple[str, ...]]
    changes: tuple[tuple[str, str], ...]
    troubles: tuple[Trouble, ...]


class SystemWorld(World):
    """An incident in one system: every look at logs begins at the same minute, and so does every look at a metric."""

    def __init__(self, rng: Random, system: System) -> None:
        super().__init__(rng)
        self.system = system
        self.change = rng.randrange(7 * 60, 22 * 60)
        self.start = self.change - rng.choice((1, 2, 3, 4, 4, 6, 8, 12, 16, 20))
        self.every = rng.choice(system.every)
        self.names |= {
            "victim": system.victim,
            "at": stamp((self.change - self.change % 5) * 60)[:5],
            "clock": stamp((self.change + rng.randrange(15, 26)) * 60)[:5],
            "guilty_at": stamp((self.change - rng.randrange(2, 50)) * 60)[:5],
            "instances": str(self.instances),
            "pool": str(self.pool),
        }

    def platform(self) -> str:
        """Who talks to whom."""
        return self.text(self.system.platform)

    def logs_call(self, logs: Logs) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The call of `logs` from seven minutes after the change, and what it returns."""
        start = (self.change + 7) * 60
        arguments = {"service": logs.service, "level": logs.level, "since": stamp(start)[:5]}
        return "logs", arguments, logs.as_json(start, self.names["id"])

    def metric_call(self, metric: Metric) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The call of `metric` from shortly before the change, and what it returns."""
        drawn = replace(metric, points=self.rng.randrange(14, 21), every=self.every)
        since = stamp(self.start * 60)[:5]
        arguments = {"service": metric.service, "name": metric.name, "since": since, "every": self.every}
        answer = drawn.as_json(self.start, self.names["id"])
        if drawn.unit.startswith("percent"):
            answer["values"] = {at: min(value, 99.9) for at, value in answer["values"].items()}
        return "metric", arguments, answer

    def deploys_call(self, guilty: str, kind: str, change: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The call of `deploys`: the guilty change, as a version or as `config`, among harmless ones."""
        entries = [self._harmless(*one) for one in self.rng.sample(self.system.changes, self.rng.choice((1, 2, 2)))]
        entries.append(Deploy(self.names["guilty_at"], guilty, kind, change))
        entries.sort(key=lambda entry: entry.at)
        return "deploys", {"since": "06:00"}, {"deploys": [entry.as_json() for entry in entries]}

    def _harmless(self, service: str, change: str) -> Deploy:
        """A change that has nothing to do with it."""
        version = f"{self.rng.randrange(1, 10)}.{self.rng.randrange(0, 45)}.{self.rng.randrange(0, 6)}"
        at = stamp(self.rng.randrange(6 * 60, self.change + 12) * 60)[:5]
        return Deploy(at, service, version, change)
