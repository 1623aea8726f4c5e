"""Single questions to a timetable: the next train, a line, a fare, a stop, a station that does not exist.

Must not know: the branching search.
"""

from __future__ import annotations

from random import Random

from examples_text.rail_network import Departure, Leg, Network, clock, fare_cents
from examples_text.script import Script
from examples_text.search_rail import SYSTEM, TOOLS

from conversations import words
from conversations.rail.railways import any_railway
from conversations.words import listed, say

SYSTEMS = (
    "You [answer questions about|know the timetable of|help travellers of] a [small|regional|local] railway. [Look "
    "things up|Use the functions] before you answer[, and keep it short|. One or two sentences are enough].",
    "[Timetable assistant|You are the information desk] for the [network|trains] around {place}. Every time you "
    "mention comes from a board. [Fares are in euros|Prices are in euros, for one adult]. [Be brief|Keep it short].",
    "You are {name}, [the voice|the assistant] of the {place} railway. [Never guess a time|Do not guess]: ask the "
    "board. Times are in 24 hours.",
)
NEXT = (
    "When is the next train from {start} to {end} after {after}?",
    "[Hi|Hello], I'm at {start} and [want to go|have to get] to {end}. What leaves after {after}?",
    "[Next train|Which train can I take] {start} to {end}, [not before|from] {after}[ on|]?",
    "I can be at {start} station at {after}. How do I get to {end}?",
)
FOUND = (
    "The next one is the {dep} {line} from {start}. It reaches {end} at {arrival}, after {minutes} minutes.",
    "Take the {line} at {dep}; you are at {end} at {arrival}, {minutes} minutes later.",
    "[The {line} leaves {start} at {dep} and is at {end} at {arrival}|{dep} with the {line}, arriving at {end} at "
    "{arrival}].",
)
WITHOUT = (
    "None of the next trains from {start} calls at {end}, so you would have to change. [Shall I look for a way|I can "
    "search for a connection if you like].",
    "I see no direct train from {start} to {end} after {after}. [Shall I look for a connection with a change|Would a "
    "change be all right]?",
)
LATER = (
    "[And|What is] the one after that?",
    "[That's too early|I might miss that one]. When is the next one[ after that|]?",
)
LATER_FOUND = (
    "The one after that is the {dep} {line}; it is at {end} at {arrival}.",
    "At {dep}, also [with|on] the {line}. [It arrives|You arrive] at {arrival}.",
)
LATER_NONE = ("The board shows no later one. [I would have to look|Ask me for the board] from {dep} on[ again|].",)
COSTS = (
    "[What|How much] does it cost?",
    "[And the fare|What's the fare]?",
    "How much is a ticket[ for that one|]?",
)
COST = (
    "One adult pays {euros} euros for the {line} from {start} to {end}.",
    "The fare is {euros} euros.",
    "{euros} euros[, second class|, for one adult].",
)
COST_MANY = (
    "[We are|There are] {count} of us. [How much is that|What do we pay] [in all|together]?",
    "And for {count} [people|adults]?",
)
COST_ALL = (
    "{count} times {euros} euros is {total} euros.",
    "For {count} adults it is {total} euros, {euros} euros each.",
)
STOPS = (
    "Where does the {dep} stop [on the way|before {end}]?",
    "Does the {dep} {line} stop anywhere before {end}?",
)
LINES = (
    "Which lines stop at {start}?",
    "What [trains|lines] go from {start}?",
    "[How often do trains run|Which lines are there] at {start}?",
)
UNKNOWN = (
    "There is no station called {wrong}. Did you mean {start}?",
    "I can't find a station {wrong}. Is it {start} that you mean?",
)
YES = ("Yes, {start}.", "[Oh yes|Yes], sorry, {start}.", "{start}, [exactly|right].")


def _direct(network: Network, start: str, end: str, after: int, rows: int) -> list[Leg]:
    """The trains on a board that call at the end."""
    legs = []
    for train in network.departures(start, after)[:rows]:
        legs += [Leg(train, stop, time) for stop, time in train.calls() if stop == end]
    return legs


def _target(rng: Random, network: Network, start: str, after: int) -> str:
    """A station that the next trains mostly reach."""
    trains: list[Departure] = network.departures(start, after)[:5]
    if not trains or rng.random() < 0.12:
        return rng.choice([name for name in network.stations if name != start])
    return rng.choice(rng.choice(trains).calls())[0]


def _between(script: Script, rng: Random, leg: Leg) -> None:
    """The stops on the way, from the board that was read."""
    values = {"dep": clock(leg.train.time), "line": leg.line, "end": leg.end}
    script.user(say(rng, STOPS, **values))
    stops = [f"{name} at {clock(time)}" for name, time in leg.train.calls() if time < leg.arrival][:4]
    if stops:
        script.say(f"Yes, it calls at {listed(stops)}." if rng.random() < 0.6 else f"At {listed(stops)}.")
    else:
        script.say(f"No, {leg.end} is its next stop.")


def _price(script: Script, rng: Random, leg: Leg) -> None:
    """The fare, and sometimes that of several people."""
    cents = fare_cents((leg,))
    values = {"line": leg.line, "start": leg.start, "end": leg.end, "euros": f"{cents / 100:.2f}"}
    script.user(say(rng, COSTS))
    script.call(None, ("fare", {"legs": [leg.as_json()]}, {"cents": cents}))
    script.say(say(rng, COST, **values))
    if rng.random() < 0.4:
        count = rng.randrange(2, 6)
        script.user(say(rng, COST_MANY, count=count))
        script.say(say(rng, COST_ALL, count=count, total=f"{count * cents / 100:.2f}", **values))


def _next_train(script: Script, rng: Random, network: Network) -> None:
    """The next train, and what is asked about it."""
    start, after = rng.choice(network.stations), 60 * rng.randrange(6, 20) + rng.choice((0, 10, 15, 30, 40, 45))
    end = _target(rng, network, start, after)
    rows = rng.choice((3, 4, 5, 6))
    values = {"start": start, "end": end, "after": clock(after)}
    script.user(say(rng, NEXT, **values))
    asked = start
    if rng.random() < 0.12:
        asked = start.replace(start[-2:], "", 1)
        script.messages[-1]["content"] = script.messages[-1]["content"].replace(start, asked)
        arguments = {"station": asked, "after": clock(after), "rows": rows}
        script.call(None, ("board", arguments, {"error": f"no station {asked}", "similar": [start]}))
        script.say(say(rng, UNKNOWN, wrong=asked, start=start))
        script.user(say(rng, YES, start=start))
    arguments = {"station": start, "after": clock(after), "rows": rows}
    script.call(None, ("board", arguments, network.board(start, after, rows)))
    legs = _direct(network, start, end, after, rows)
    if not legs:
        script.say(say(rng, WITHOUT, **values))
        return
    script.say(say(rng, FOUND, minutes=legs[0].arrival - legs[0].train.time, **_parts(legs[0])))
    chosen = legs[0]
    if rng.random() < 0.5:
        script.user(say(rng, LATER))
        if len(legs) > 1:
            chosen = legs[1]
            script.say(say(rng, LATER_FOUND, **_parts(chosen)))
        else:
            script.say(say(rng, LATER_NONE, dep=clock(legs[0].train.time + 1)))
    if rng.random() < 0.4:
        _between(script, rng, chosen)
    if rng.random() < 0.5:
        _price(script, rng, chosen)


def _parts(leg: Leg) -> dict[str, str]:
    """What can be said about a leg."""
    times = {"dep": clock(leg.train.time), "arrival": clock(leg.arrival)}
    return {"line": leg.line, "start": leg.start, "end": leg.end, **times}


def _lines(script: Script, rng: Random, network: Network) -> None:
    """The lines of a station."""
    start = rng.choice(network.stations)
    script.user(say(rng, LINES, start=start))
    known = network.station(start)
    script.call(None, ("station", {"name": start}, known))
    rows = known["lines"][:3]
    parts = [
        f"the {row['line']} between {row['ends'][0]} and {row['ends'][1]} every {row['every_minutes']} minutes"
        for row in rows
    ]
    more = "Among others, " if len(known["lines"]) > 3 else ""
    text = f"{more}{listed(parts)}."
    script.say(f"{text[0].upper()}{text[1:]} A change takes at least {known['least_change_minutes']} minutes.")


def conversation(rng: Random, name: str) -> Script:
    """One or two questions, under a short system prompt or that of the search."""
    network = any_railway(rng)
    short = say(rng, SYSTEMS, place=words.town(rng), name=words.given_name(rng))
    script = Script(name, SYSTEM if rng.random() < 0.2 else short, rng.sample(TOOLS, len(TOOLS)))
    if rng.random() < 0.25:
        _lines(script, rng, network)
        if rng.random() < 0.5:
            return script
    _next_train(script, rng, network)
    return script
