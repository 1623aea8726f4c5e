"""Branching search for train journeys: one root for each trip, one conversation for each journey looked at.

The conversations of a trip are the same up to the branch they expand, or to the train they choose on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from examples_text.rail_network import NETWORK, Journey, Leg, clock, fare_cents, shortest_change
from examples_text.script import MAX_MESSAGES, Script, function

SYSTEM = (Path(__file__).parent / "prompts" / "rail.txt").read_text(encoding="utf-8").strip()
TIME = {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"}
TOOLS = [
    function(
        "station",
        "What is known about a station: its lines, and how long a change takes.",
        {"name": "The name of the station."},
    ),
    function(
        "board",
        "The next departures of a station, each with its later stops and the times there.",
        {"station": "The name of the station.", "after": {**TIME, "description": "The first departure."}},
        rows={"type": "integer", "minimum": 1, "maximum": 12, "description": "How many trains; usually 8."},
    ),
    function(
        "fare",
        "The price of a journey in cents.",
        {
            "legs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "line": {"type": "string"},
                        "from": {"type": "string"},
                        "to": {"type": "string"},
                        "dep": TIME,
                    },
                },
            }
        },
    ),
]
NUMBERS = ("no changes", "one change", "two changes", "three changes")


@dataclass(frozen=True)
class Trip:
    """What a traveller wants; times are minutes after midnight."""

    name: str
    start: str
    end: str
    after: int
    arrive_by: int
    cents: int
    change: int
    story: str


TRIPS = (
    Trip(
        "aldmere",
        "Aldmere",
        "Westering",
        420,
        620,
        2000,
        10,
        "I have a hearing at the town hall of Westering at eleven and would like to be there half an "
        "hour early.",
    ),
    Trip(
        "farrow",
        "Farrow",
        "Marrow Head",
        500,
        720,
        2500,
        15,
        "My mother is coming along. She is 78 and walks slowly, so please no mad dashes between platforms.",
    ),
    Trip(
        "junipers",
        "Junipers",
        "Innisbay",
        600,
        870,
        2200,
        12,
        "The boat to the island leaves Innisbay at three in the afternoon, and it is the last one of the "
        "day.",
    ),
)


def wishes(trip: Trip) -> str:
    """The first message."""
    return (
        f"Please find me a way from {trip.start} to {trip.end} on Thursday. I can't leave before "
        f"{clock(trip.after)} and want to arrive by {clock(trip.arrive_by)}. {trip.story} I'd rather not "
        f"spend more than {trip.cents // 100} euros, and I want at least {trip.change} minutes for every "
        "change. Show me the branches before you follow one, I'd like to have a say in it."
    )


def root(trip: Trip, branches: list[Leg], name: str) -> Script:
    """Everything before a branch is chosen."""
    script = Script(name, SYSTEM, TOOLS)
    script.user(wishes(trip))
    script.call(
        f"I'll see first which lines {trip.start} and {trip.end} are on.",
        ("station", {"name": trip.start}, NETWORK.station(trip.start)),
        ("station", {"name": trip.end}, NETWORK.station(trip.end)),
    )
    arguments = {"station": trip.start, "after": clock(trip.after), "rows": 10}
    first_board = NETWORK.board(trip.start, trip.after, 10)
    script.call("Now the board of the first station.", ("board", arguments, first_board))
    listed = "\n".join(
        f"{number}. {leg.line} at {clock(leg.train.time)}, change at {leg.end} ({clock(leg.arrival)})"
        for number, leg in enumerate(branches, start=1)
    )
    script.say(
        f"There is no train from {trip.start} to {trip.end} without a change at this time. These are the "
        f"branches, by the time at which one can change:\n{listed}\nThere is no bound yet. Which one shall I "
        "expand first?"
    )
    return script


def expand(script: Script, journey: Journey) -> None:
    """Follow one journey from board to board."""
    for here in journey[:-1]:
        ready = here.arrival + NETWORK.change_minutes(here.end)
        arguments = {"station": here.end, "after": clock(ready)}
        text = (
            f"The {clock(here.train.time)} {here.line} from {here.start} is at {here.end} at "
            f"{clock(here.arrival)}. With {NETWORK.change_minutes(here.end)} minutes for the change I need the "
            f"board of {here.end} from {clock(ready)}."
        )
        if here is not journey[0]:
            text = f"From here I take the {here.line} to {here.end}. {text}"
        script.call(text, ("board", arguments, NETWORK.board(here.end, ready)))
    last = journey[-1]
    script.call(
        f"The {clock(last.train.time)} {last.line} from {last.start} reaches {last.end} at "
        f"{clock(last.arrival)}: a complete journey. Its fare is still missing.",
        ("fare", {"legs": [leg.as_json() for leg in journey]}, {"cents": fare_cents(journey)}),
    )


def plural(number: int) -> str:
    """The end of a noun that is counted."""
    return "" if number == 1 else "s"


def verdict(trip: Trip, journey: Journey) -> str:
    """Whether the wishes are met, and by how much they are not."""
    misses = []
    late, tight = journey[-1].arrival - trip.arrive_by, shortest_change(journey)
    dear = fare_cents(journey) - trip.cents
    if late > 0:
        misses.append(f"it arrives {late} minute{plural(late)} after {clock(trip.arrive_by)}")
    if dear > 0:
        misses.append(f"it costs {dear / 100:.2f} euros more than you wanted to spend")
    if tight is not None and tight < trip.change:
        short = trip.change - tight
        misses.append(f"the shortest change is {short} minute{plural(short)} shorter than you asked for")
    if not misses:
        return "Every wish is met, so this is the bound for the other branches."
    missed = ", and ".join(misses)
    return f"Not every wish is met: {missed}. I keep it as the bound until there is a better one."


def report(trip: Trip, journey: Journey) -> str:
    """The journey as the traveller sees it."""
    legs = "\n".join(leg.as_text() for leg in journey)
    return (
        f"{legs}\nArrival {clock(journey[-1].arrival)}, {NUMBERS[len(journey) - 1]}, shortest change "
        f"{shortest_change(journey)} minutes, {fare_cents(journey) / 100:.2f} euros. {verdict(trip, journey)}"
    )


def missed_change(script: Script, trip: Trip, journey: Journey) -> None:
    """What happens when the last change is missed."""
    last = journey[-1]
    after = last.train.time + 1
    script.user(f"And if I miss the {clock(last.train.time)} at {last.start}?")
    arguments = {"station": last.start, "after": clock(after)}
    script.call(None, ("board", arguments, NETWORK.board(last.start, after)))
    others = NETWORK.journeys(last.start, trip.end, after, changes=1)
    best = min(others, key=lambda way: way[-1].arrival, default=None)
    if best is None:
        script.say(f"Then there is no way to {trip.end} any more that day. I would not risk it.")
        return
    lost = best[-1].arrival - last.arrival
    via = f", with a change at {best[0].end}" if len(best) > 1 else ""
    script.say(
        f"Then the next way on is the {clock(best[0].train.time)} {best[0].line}{via}. You would arrive at "
        f"{clock(best[-1].arrival)}, {lost} minutes later than planned"
        f"{'' if best[-1].arrival <= trip.arrive_by else ', which is too late for you'}."
    )


def choose(trip: Trip) -> tuple[list[Leg], list[Journey]]:
    """The branches of a trip, and four journeys to look at: two on each of two branches."""
    found = sorted(NETWORK.journeys(trip.start, trip.end, trip.after), key=lambda way: way[-1].arrival)
    found = [way for way in found if len(way) > 1]
    branches = sorted({way[0] for way in found}, key=lambda leg: (leg.arrival, leg.line, leg.end))
    by_branch = sorted(found, key=lambda way: branches.index(way[0]))
    groups = [list(group)[:2] for _, group in groupby(by_branch, key=lambda way: way[0])]
    pairs = [group for group in groups if len(group) == 2]
    return branches, [way for group in pairs[:2] for way in group]


def conversations() -> Iterator[Script]:
    """All rail conversations; one in four leaves the last answer out."""
    count = 0
    for trip in TRIPS:
        branches, chosen = choose(trip)
        for letter, journey in zip("abcd", chosen, strict=True):
            script = root(trip, branches, f"search-rail-{trip.name}-{letter}")
            script.user(f"Expand branch {branches.index(journey[0]) + 1}, please.")
            expand(script, journey)
            script.say(report(trip, journey))
            if len(script.messages) <= MAX_MESSAGES - 4:
                missed_change(script, trip, journey)
            count += 1
            if count % 4 == 3:
                script.drop_answer()
            yield script
