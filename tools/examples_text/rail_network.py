"""A railway that does not exist: stations, lines, departures, fares, and the journeys between two stations.

Times are minutes after midnight. Must not know: what anyone says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LATEST = 23 * 60
HOLLIN = "Hollin Junction"


@dataclass(frozen=True)
class Service:
    """A line in one direction: stops, minutes to the next stop, first departure, minutes between trains."""

    line: str
    stops: tuple[str, ...]
    minutes: tuple[int, ...]
    first: int
    every: int
    cents_a_minute: int

    def at(self, index: int, run: int) -> int:
        """When train number `run` is at the stop with this index."""
        return self.first + run * self.every + sum(self.minutes[:index])

    def next_run(self, index: int, after: int) -> int:
        """The first train that leaves the stop with this index at `after` or later."""
        return max(0, -(-(after - self.at(index, 0)) // self.every))

    def reverse(self) -> Service:
        """The same line the other way."""
        stops, minutes = self.stops[::-1], self.minutes[::-1]
        return Service(self.line, stops, minutes, self.first + 7, self.every, self.cents_a_minute)


def clock(minutes: int) -> str:
    """Minutes after midnight as HH:MM."""
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


@dataclass(frozen=True)
class Departure:
    """One train at one stop: the service, its run, the index of the stop."""

    service: Service
    run: int
    index: int

    @property
    def time(self) -> int:
        """When it leaves this stop."""
        return self.service.at(self.index, self.run)

    def calls(self) -> list[tuple[str, int]]:
        """The later stops and when it is there."""
        indices = range(self.index + 1, len(self.service.stops))
        return [(self.service.stops[i], self.service.at(i, self.run)) for i in indices]

    def as_json(self) -> dict[str, Any]:
        """The row of the board."""
        calls = [f"{name} {clock(time)}" for name, time in self.calls()]
        destination = self.service.stops[-1]
        return {"dep": clock(self.time), "line": self.service.line, "to": destination, "calls_at": calls}


@dataclass(frozen=True)
class Leg:
    """One train of a journey, from where it is boarded to where it is left."""

    train: Departure
    end: str
    arrival: int

    @property
    def start(self) -> str:
        """Where it is boarded."""
        return self.train.service.stops[self.train.index]

    @property
    def line(self) -> str:
        """The name of its line."""
        return self.train.service.line

    def as_text(self) -> str:
        """The line of a report."""
        return f"{clock(self.train.time)} {self.start}, {self.line}, {clock(self.arrival)} {self.end}"

    def as_json(self) -> dict[str, str]:
        """The leg as `fare` wants it."""
        return {"line": self.line, "from": self.start, "to": self.end, "dep": clock(self.train.time)}


Journey = tuple[Leg, ...]


def fare_cents(journey: Journey) -> int:
    """Minutes on each train by the price of its line, and 90 cents a leg."""
    return sum(90 + (leg.arrival - leg.train.time) * leg.train.service.cents_a_minute for leg in journey)


def shortest_change(journey: Journey) -> int | None:
    """The minutes of the tightest change; None without a change."""
    pairs = zip(journey, journey[1:], strict=False)
    return min((after.train.time - before.arrival for before, after in pairs), default=None)


class Network:
    """Lines in both directions, and the one station where a change takes longer."""

    def __init__(self, one_way: tuple[Service, ...], wide: str) -> None:
        self.one_way = one_way
        self.wide = wide
        self.services = (*one_way, *(service.reverse() for service in one_way))
        self.stations = sorted({stop for service in one_way for stop in service.stops})
        lines = {stop: [s.line for s in one_way if stop in s.stops] for stop in self.stations}
        self.junctions = {stop for stop, names in lines.items() if len(names) > 1}
        self.leaving: dict[str, list[tuple[Service, int]]] = {stop: [] for stop in self.stations}
        for service in self.services:
            for index, stop in enumerate(service.stops[:-1]):
                self.leaving[stop].append((service, index))

    def change_minutes(self, station: str) -> int:
        """How long a change takes at least."""
        return 10 if station == self.wide else 6

    def station(self, name: str) -> dict[str, Any]:
        """What the function `station` returns."""
        lines = [
            {"line": one.line, "ends": [one.stops[0], one.stops[-1]], "every_minutes": one.every}
            for one in self.one_way
            if name in one.stops
        ]
        return {"name": name, "lines": lines, "least_change_minutes": self.change_minutes(name)}

    def departures(self, station: str, after: int) -> list[Departure]:
        """Every train that leaves the station from `after` on, by time."""
        found = []
        for service, index in self.leaving[station]:
            run = service.next_run(index, after)
            while service.at(index, run) < LATEST:
                found.append(Departure(service, run, index))
                run += 1
        return sorted(found, key=lambda d: (d.time, d.service.line))

    def board(self, station: str, after: int, rows: int = 8) -> dict[str, Any]:
        """What the function `board` returns."""
        trains = [train.as_json() for train in self.departures(station, after)[:rows]]
        return {"station": station, "from": clock(after), "departures": trains}

    def first_trains(self, station: str, after: int) -> list[Departure]:
        """The next train of each service, by time."""
        trains = [Departure(one, one.next_run(index, after), index) for one, index in self.leaving[station]]
        return sorted((t for t in trains if t.time < LATEST), key=lambda d: (d.time, d.service.line))

    def journeys(self, start: str, end: str, after: int, changes: int = 3) -> Iterator[Journey]:
        """Every journey that takes the next train of a line each time and visits no station twice."""

        def extend(
            journey: Journey, here: str, ready: int, visited: frozenset[str]
        ) -> Iterator[Journey]:
            for train in self.first_trains(here, ready):
                passed: set[str] = set()
                if journey and train.service.line == journey[-1].line:
                    continue
                for stop, time in train.calls():
                    if stop in visited:
                        break
                    passed.add(stop)
                    leg = Leg(train, stop, time)
                    if stop == end:
                        yield (*journey, leg)
                        break
                    if stop in self.junctions and len(journey) < changes:
                        yield from extend(
                            (*journey, leg), stop, time + self.change_minutes(stop), visited | passed
                        )

        yield from extend((), start, after, frozenset({start}))


NETWORK = Network(
    (
        Service(
            "Coast Express",
            ("Calder Quay", "Innisbay", "Ravensea", HOLLIN, "Vennor"),
            (18, 22, 35, 40),
            342,
            60,
            21,
        ),
        Service(
            "Moor Line",
            ("Aldmere", "Brackenford", "Dunholt", HOLLIN, "Kelling", "Stannick", "Ulverby"),
            (14, 12, 16, 13, 17, 21),
            325,
            40,
            14,
        ),
        Service(
            "Northern",
            ("Ulverby", "Marrow Head", "Vennor", "Westering"),
            (25, 19, 30),
            351,
            75,
            15,
        ),
        Service(
            "Lakes Line",
            ("Glasswater", "Kelling", "Tolland", "Westering", "Oakhanger"),
            (15, 18, 14, 11),
            338,
            45,
            13,
        ),
        Service(
            "Estuary Shuttle",
            ("Ravensea", "Pellow", "Quarrington", "Glasswater"),
            (12, 10, 16),
            330,
            30,
            11,
        ),
        Service(
            "Orchard Line",
            ("Brackenford", "Junipers", "Yarrow Bridge", "Eastwick Cross", "Netherby", "Tolland"),
            (13, 15, 11, 20, 26),
            333,
            50,
            12,
        ),
        Service(
            "Valley Stopper",
            ("Eastwick Cross", "Farrow", "Loxley Vale", HOLLIN, "Quarrington"),
            (9, 11, 24, 19),
            327,
            35,
            10,
        ),
        Service("Fast Train", ("Aldmere", "Tolland", "Vennor"), (55, 48), 385, 120, 26),
    ),
    HOLLIN,
)
