"""The services of one company, the times of one incident, and what its logs and metrics show.

Must not know: what may be wrong (faults) or how it is told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from examples_text.incident_data import Deploy, Logs, Metric, stamp

from conversations import words
from conversations.words import vary

SUBJECTS = words.word_list("subjects")
_KINDS = ("api", "service", "api", "service", "core", "backend", "server")
_PROVIDER_HEADS = (
    "blue",
    "north",
    "quick",
    "swift",
    "clear",
    "open",
    "rapid",
    "true",
    "prime",
    "silver",
    "east",
    "one",
)
_PROVIDER_TAILS = ("pay", "post", "route", "maps", "sign", "send", "rates", "check", "score", "link", "mail", "data")
_DATABASES = ("postgres", "postgres", "mysql", "mariadb", "pg")
_ROUTINE = (
    "Translate the error page", "Log the length of the queue", "Update the client library",
    "Show the last login on the profile page", "Remove an unused endpoint", "Add a test page for the monitors",
    "Write the version into the header", "Rename a log field", "Show prices with two decimals",
    "Add a filter to the list", "Update the logo", "Accept postcodes with spaces", "Sort the export by date",
    "Raise the log level of the start page to debug", "Count page views by country",
)  # fmt: skip
_MARK = re.compile(r"<(\w+)>")


def fill(rng: Random, text: str, names: dict[str, str]) -> str:
    """The text with its alternatives drawn and each `<name>` replaced; `{}` stays, for the draws of a log line."""
    return _MARK.sub(lambda found: names.get(found[1], found[0]), vary(rng, text))


@dataclass(frozen=True)
class Level:
    """A metric by name and unit, with the ranges of its value before and after the change."""

    name: str
    unit: str
    before: tuple[float, float]
    after: tuple[float, float]
    gradual: bool = False

    def draw(self, rng: Random, service: str, change: int, calm: bool = False) -> Metric:
        """The metric of a service with a change at a minute; a calm one stays as it was."""
        before, after = (self._value(rng, ends) for ends in (self.before, self.after))
        return Metric(service, self.name, self.unit, before, before if calm else after, change, self.gradual)

    def _value(self, rng: Random, ends: tuple[float, float]) -> float:
        low, high = ends
        value = rng.uniform(low, high)
        return round(value, 1) if high < 100 else float(round(value))


class World:
    """The services by role, and the minute at which it all began."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        subject = rng.choice(SUBJECTS)
        others = rng.sample([name for name in SUBJECTS if name != subject], 2)
        provider = rng.choice(_PROVIDER_HEADS) + rng.choice(_PROVIDER_TAILS)
        self.change = 60 * rng.randrange(2, 22) + rng.randrange(60)
        said = self.change - self.change % 5
        self.instances = rng.choice((3, 4, 6, 8, 10, 12, 16))
        self.pool = rng.choice((10, 15, 20, 25, 30, 40))
        self.names = {
            "subject": subject,
            "victim": f"{subject}-{rng.choice(_KINDS)}",
            "other": f"{others[0]}-{rng.choice(_KINDS)}",
            "client": f"{others[1]}-{rng.choice(('worker', 'job', 'web', 'import', 'export'))}",
            "database": f"{rng.choice(_DATABASES)}-{subject}s",
            "cache": f"redis-{subject}s" if rng.random() < 0.7 else f"cache-{rng.randrange(1, 5)}",
            "queue": f"queue-{subject}s" if rng.random() < 0.7 else f"broker-{rng.randrange(1, 4)}",
            "adapter": f"{rng.choice(('rates', 'payment', 'mail', 'address', 'print', 'tax', 'map'))}-adapter",
            "provider": provider,
            "gateway": rng.choice(("gateway", "gateway", "edge", "ingress", "front-proxy")),
            "table": f"{subject}_{rng.choice(('lines', 'events', 'items', 'entries', 'history'))}",
            "column": f"{rng.choice(('owner', 'parent', 'account', 'batch', 'source', 'group'))}_ref",
            "node": f"node-{rng.randrange(1, 40):02d}",
            "at": stamp(said * 60)[:5],
            "guilty_at": stamp((self.change - rng.randrange(4, 40)) * 60)[:5],
            "version": f"{rng.randrange(1, 12)}.{rng.randrange(0, 30)}.{rng.randrange(0, 9)}",
            "migration": f"{rng.randrange(10, 400):04d}",
            "small": str(rng.choice((2, 5, 8, 10))),
            "large": str(rng.choice((50, 100, 200, 500))),
            "count": str(rng.randrange(12, 900)),
            "id": f"{rng.getrandbits(24):06x}",
        }

    def text(self, template: str, **more: str) -> str:
        """A template with this company's names."""
        return fill(self.rng, template, self.names | more)

    def platform(self) -> str:
        """Who talks to whom."""
        return self.text(
            "<gateway> -> <victim> -> (<database>, <cache>, <adapter>); <client> takes jobs from <queue>. <victim> "
            "runs "
            f"with {self.instances} instances and a pool of {self.pool} connections each."
        )

    def logs(
        self,
        service: str,
        level: str,
        patterns: tuple[str, ...],
        decisive: str = "",
        lines: int = 0,
        slow: bool = False,
    ) -> Logs:
        """What a service wrote, with the names filled in; a slow one takes seconds where others take milliseconds."""
        filled = tuple(self.text(pattern) for pattern in patterns)
        count = lines or self.rng.randrange(5, 13)
        more = self.rng.choice((0, 0, self.rng.randrange(4, 90), self.rng.randrange(100, 3000)))
        low, high = (1400, 2990) if slow else (20, 400)
        return Logs(service, level, filled, self.text(decisive), count, more, low, high)

    def logs_call(self, logs: Logs) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The call of `logs` from the minute that was named, and what it returns."""
        arguments = {"service": logs.service, "level": logs.level, "since": self.names["at"]}
        return "logs", arguments, logs.as_json(self.change * 60, self.names["id"])

    def metric_call(self, metric: Metric) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The call of `metric` from ten minutes before, and what it returns."""
        hour, minute = map(int, self.names["at"].split(":"))
        start = hour * 60 + minute - 10
        every = self.rng.choice((2, 2, 5))
        drawn = replace(
            metric, points=self.rng.randrange(9, 17) if every == 2 else self.rng.randrange(6, 10), every=every
        )
        arguments = {"service": metric.service, "name": metric.name, "since": stamp(start * 60)[:5], "every": every}
        answer = drawn.as_json(start, self.names["id"])
        if drawn.unit == "percent":
            answer["values"] = {at: min(value, 99.9) for at, value in answer["values"].items()}
        return "metric", arguments, answer

    def deploys_call(self, guilty: str, kind: str, change: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The call of `deploys`: the guilty change among routine ones. Without a guilty service all are routine."""
        entries = [self._routine(guilty) for _ in range(self.rng.randrange(1, 4))]
        if guilty:
            version = self.names["version"] if kind == "version" else "config"
            entries.append(Deploy(self.names["guilty_at"], guilty, version, change))
        since = self.rng.choice(("06:00", "00:00")) if self.change > 400 else "00:00"
        entries = [entry for entry in entries if entry.at >= since]
        entries.sort(key=lambda entry: entry.at)
        return "deploys", {"since": since}, {"deploys": [entry.as_json() for entry in entries]}

    def _routine(self, guilty: str) -> Deploy:
        """A change that has nothing to do with it, of another service."""
        others = [self.names[role] for role in ("other", "client", "gateway") if self.names[role] != guilty]
        service = self.rng.choice(others)
        version = f"{self.rng.randrange(1, 9)}.{self.rng.randrange(0, 40)}.{self.rng.randrange(0, 6)}"
        at = stamp(max(0, self.change - self.rng.randrange(45, 600)) * 60)[:5]
        return Deploy(at, service, version, self.rng.choice(_ROUTINE))


def decisive_line(answer: dict[str, Any]) -> str:
    """The line that decides, as `Logs` places it: without its time and level."""
    lines: list[str] = answer["lines"]
    return lines[len(lines) - 3].split(" ", 2)[2]


def values(answer: dict[str, Any], change: int) -> dict[str, str]:
    """The last value before the change, the first value after it, its minute, and the last of all."""
    known = list(answer["values"].items())
    border = stamp(change * 60)[:5]
    earlier = [pair for pair in known if pair[0] < border] or known[:1]
    later = [pair for pair in known if pair[0] >= border] or known[-1:]
    return {
        "before": f"{earlier[-1][1]}",
        "till": earlier[-1][0],
        "after": f"{later[0][1]}",
        "from": later[0][0],
        "last": f"{known[-1][1]}",
        "until": known[-1][0],
        "unit": answer["unit"],
    }
