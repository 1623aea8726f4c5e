"""Railways: that of the examples, and others that are drawn, with stations, lines and departures for the train search.

Must not know: what anyone says.
"""

from __future__ import annotations

from random import Random

from examples_text.rail_network import HOLLIN, NETWORK, Network, Service

from conversations import words

_LINE_HEADS = words.word_list("lines")
_LINE_TAILS = ("Line", "Line", "Line", "Express", "Stopper", "Shuttle", "Link", "Railway", "Branch", "Fast")
EXAMPLES = 0.4  # of the conversations are about the examples' railway
_STATION_TAILS = ("Road", "Park", "Central", "Cross", "Bridge", "Quay", "Head", "Green")


def _stations(rng: Random, count: int) -> list[str]:
    """Different names, one of them the wide junction."""
    names = [HOLLIN]
    while len(names) < count:
        name = words.town(rng)
        if len(name) <= 6 and rng.random() < 0.5:
            name += f" {rng.choice(_STATION_TAILS)}"
        if len(name) <= 10 and name not in names:
            names.append(name)
    return names


def _lines(rng: Random, count: int) -> list[str]:
    """Different names of lines."""
    names: list[str] = []
    while len(names) < count:
        name = f"{rng.choice(_LINE_HEADS)} {rng.choice(_LINE_TAILS)}"
        if name not in names:
            names.append(name)
    return names


def railway(rng: Random) -> Network:
    """Lines that meet at a few hubs; every other station is on one line."""
    count = rng.randrange(4, 8)
    hubs = _stations(rng, rng.randrange(3, 6))
    quiet = [name for name in _stations(rng, count * 4 + 8) if name not in hubs]
    services = []
    for number, line in enumerate(_lines(rng, count)):
        met = rng.sample(hubs, min(len(hubs), rng.choice((1, 2, 2, 3))))
        if number < len(hubs) and hubs[number] not in met:
            met[0] = hubs[number]
        stops = [*met, *(quiet.pop() for _ in range(rng.randrange(1, 4)))]
        if len(stops) == 2:
            stops.append(quiet.pop())
        rng.shuffle(stops)
        minutes = tuple(rng.randrange(9, 34) for _ in stops[1:])
        every = rng.choice((20, 25, 30, 30, 35, 40, 45, 50, 60, 60, 75, 90))
        first = 300 + rng.randrange(90)
        services.append(Service(line, tuple(stops), minutes, first, every, rng.randrange(9, 27)))
    return Network(tuple(services), HOLLIN)


def any_railway(rng: Random) -> Network:
    """The examples' railway, or one that is drawn."""
    return NETWORK if rng.random() < EXAMPLES else railway(rng)
