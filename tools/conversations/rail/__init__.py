"""Branching search for a train journey, on a railway that is drawn or on that of the examples, in the examples' words
and in others.

The examples' own trips are held out.
"""

from __future__ import annotations

from random import Random

from examples_text.rail_network import Journey, Leg, Network, clock, fare_cents, shortest_change
from examples_text.script import MAX_MESSAGES, Call, Script, to_json
from examples_text.search_rail import NUMBERS, SYSTEM, TOOLS, TRIPS, Trip, verdict, wishes

from conversations import words
from conversations.rail import questions
from conversations.rail.railways import any_railway
from conversations.words import say

SEARCHES = 0.7  # of the conversations; the others are single questions
LISTED = 6  # branches that are shown at most
HELD_OUT = {frozenset((trip.start, trip.end)) for trip in TRIPS}
LONGEST_FARE = 236  # characters of the call of `fare` and its remark, so that answers are short
LONGEST_REPORT = 238  # characters; the last sentence is shorter where the report is longer
LONGEST_WAY = 3  # legs
DETOUR = 75  # minutes; journeys that arrive later than this after the first are not looked at

STORIES = (
    "[I have|There is] [an appointment|a job interview|a hearing|a meeting|an exam|a court date] [near the station|in "
    "the town|at the town hall|at the {place}] [at {hour}|soon after that|an hour later], [so please be careful with "
    "the changes|and I can't be late|and I would like to be there a little early].",
    "[My mother|My father|My grandmother|My aunt|A friend|A colleague] is coming along[. {She} is {age}|, {age} years "
    "old,] and [walks slowly|can't climb stairs quickly|has a knee that hurts|gets tired easily], so [please no mad "
    "dashes|no running between platforms, please|please no mad dashes between platforms|give us time].",
    "The [ferry|boat|coach|ceremony|concert|tour|last bus] [to the island |to the camp |]leaves [{end} |]at [{hour}|"
    "three in the afternoon|half past], and [it won't wait|I have the ticket already|it is the last one of the day].",
    "I travel with [two children|a large suitcase|a cello|a dog|a pram|three bicycles|a box of seedlings|skis], so "
    "[time to change matters more than speed|I'd like to change in peace|short changes are no good].",
    "[It is my first time on this line|I don't know the area|I have never been to {end}], so [keep it simple|tell me "
    "exactly where to change].",
    "I [buy|sell|deliver|collect] {thing} [in|near] {end} and [the shop closes early|they close at {hour}|must be back "
    "the same day].",
    "[My sister|A taxi|A client|The driver] [picks me up|meets me|waits for me] at the station[ at {hour}|], and "
    "[waiting costs money|{She} hates waiting|I don't want to keep anybody waiting].",
    "We are a group of {count} [with|and] one wheelchair, [and the lift is slow|so steps are a problem].",
    "I [get sick on|don't like] [buses|crowded trains], [so trains only|so rather a quiet one], and I [read|sleep] "
    "[all the way|on the way].",
    "It is [my birthday|a surprise for a friend|for a school trip|a day off], [so nothing must go wrong|and the "
    "weather is supposed to be good].",
    "",
)
PLACES = ("library", "hospital", "museum", "school", "harbour office", "theatre", "market hall", "tax office", "clinic")
THINGS = ("honey", "old books", "cheese", "spare parts", "flowers", "a violin", "tools", "wool", "maps", "a used bike")
OTHER_WISHES = (
    "[How do I get|I need to get|Can you get me] from {start} to {end} [on {day}|this {day}]{mark} [Not before|I can "
    "leave at] {after}, [arriving|and I have to be there] by {by}. {story} [My limit is|I can spend] {euros} euros, "
    "and [each change should have|please leave me] at least {change} minutes[ for every change|]. [List the branches "
    "first|Show me what there is before you follow anything].",
    "[Hello|Hi]! {start} to {end}, {day}, after {after}, [there|arrival] by {by}. [At most|No more than] {euros} "
    "euros, changes of {change} minutes or more. {story} I'd like to choose the branch[ myself|].",
)
FIRST_LOOKS = (
    "I'll see first which lines {start} and {end} are on.",
    "I'll see first which lines {start} and {end} are on.",
    "[First I look|I begin by looking|Let me look] at the lines of {start} and {end}.",
)
FIRST_BOARDS = (
    "Now the board of the first station.",
    "Now the board of the first station.",
    "[Now|Next] the board of {start} from {after}.",
    "[That helps|Good]. Now the [departures|board] of {start}.",
)
OPENINGS = (
    "There is no train from {start} to {end} without a change at this time. {these}, by the time at which one can "
    "change:",
    "There is no train from {start} to {end} without a change at this time. {these}, by the time at which one can "
    "change:",
    "[No direct train|No train without a change] from {start} to {end}. {these}:",
)
ASKS = (
    "There is no bound yet. Which one shall I expand first?",
    "There is no bound yet. Which one shall I expand first?",
    "No bound yet. Which one [first|shall I expand]?",
)
PICKS = (
    "Expand branch {n}, please.",
    "Expand branch {n}, please.",
    "[Take|Try|Follow] [number|branch] {n}[, please|].",
    "[Number|Branch] {n} [looks good|please|first].",
    "The {line} at {dep}, [change at|via] {end}, please.",
)
CHANGES = (
    "The {dep} {line} from {start} is at {end} at {arrival}. With {minutes} minutes for the change I need the board of "
    "{end} from {ready}.",
    "The {dep} {line} from {start} is at {end} at {arrival}. With {minutes} minutes for the change I need the board of "
    "{end} from {ready}.",
    "The {dep} {line} reaches {end} at {arrival}. A change takes {minutes} minutes there, so I look at the board from "
    "{ready}.",
    "{end} at {arrival} with the {dep} {line}, plus {minutes} minutes: the board from {ready}.",
)
FARES = (
    "The {dep} {line} from {start} reaches {end} at {arrival}: a complete journey. Its fare is still missing.",
    "The {dep} {line} from {start} reaches {end} at {arrival}: a complete journey. Its fare is still missing.",
    "With the {dep} {line} you are at {end} at {arrival}. [Now the fare|I ask for the fare].",
)
SHORT_FARE = "A complete journey. Now its fare."
MISSES = (
    "And if I miss the {dep} at {start}?",
    "And if I miss the {dep} at {start}?",
    "What [happens|do I do] if I miss the {dep} [at|from] {start}?",
    "Suppose the train is late and I miss the {dep} at {start}. [What then|When would I arrive]?",
)
SECONDS = (
    "[And|What about|Now] branch {n}[, please|]?",
    "[Good|OK]. [Expand|Try|Now] branch {n} [as well|too], please.",
)
CLOSED = (
    "I close branch {n}: its {line} is at {end} only at {arrival}, and the bound arrives at {bound}.",
    "Branch {n} reaches {end} at {arrival}. The bound is at {to} by {bound}, so this branch cannot arrive before it "
    "any more. It is closed.",
)


def _story(rng: Random, end: str, hour: int) -> str:
    """Why somebody travels."""
    known = {"place": rng.choice(PLACES), "thing": rng.choice(THINGS), "end": end, "hour": clock(hour)}
    return say(
        rng, STORIES, She=rng.choice(("She", "He")), age=rng.randrange(61, 96), count=rng.randrange(3, 12), **known
    )


def _trip(rng: Random, network: Network) -> tuple[Trip, list[Journey]] | None:
    """Two stations without a direct train, and every journey between them with one or two changes."""
    start, end = rng.sample(network.stations, 2)
    if {start, end} in HELD_OUT:
        return None
    after = 60 * rng.randrange(6, 17) + rng.choice((0, 0, 15, 20, 30, 45))
    found = sorted(network.journeys(start, end, after, LONGEST_WAY - 1), key=lambda way: way[-1].arrival)
    best = found[0][-1].arrival if found else 0
    found = [way for way in found if way[-1].arrival <= best + DETOUR and len(_legs(way)) <= LONGEST_FARE]
    if not found or any(len(way) == 1 for way in found):
        return None
    by = -(-(best + rng.choice((-20, 5, 25, 40, 60))) // 5) * 5
    euros = max(4, round(fare_cents(found[0]) / 100 + rng.choice((-2, 1, 3, 5))))
    story = _story(rng, end, by + 30)
    return Trip("", start, end, after, by, euros * 100, rng.choice((6, 8, 10, 10, 12, 15)), story), found


def _ask(rng: Random, trip: Trip) -> str:
    """What the traveller writes first."""
    if rng.random() < 0.5:
        return wishes(trip).replace("Thursday", rng.choice(words.WEEKDAYS)).replace(".  ", ". ")
    day, euros = rng.choice(words.WEEKDAYS), trip.cents // 100
    times = {"after": clock(trip.after), "by": clock(trip.arrive_by)}
    known = {"start": trip.start, "end": trip.end, "story": trip.story, "change": trip.change, "mark": "."}
    return say(rng, OTHER_WISHES, day=day, euros=euros, **known, **times).replace("  ", " ")


def _parts(leg: Leg) -> dict[str, str]:
    """What can be said about a leg."""
    times = {"dep": clock(leg.train.time), "arrival": clock(leg.arrival)}
    return {"line": leg.line, "start": leg.start, "end": leg.end, **times}


def _legs(journey: Journey) -> str:
    """The argument of `fare` as text."""
    return to_json([leg.as_json() for leg in journey])


def _report(trip: Trip, journey: Journey) -> str:
    """The journey as the traveller sees it."""
    text = "\n".join(leg.as_text() for leg in journey)
    text += f"\nArrival {clock(journey[-1].arrival)}, {NUMBERS[len(journey) - 1]}, shortest change "
    text += f"{shortest_change(journey)} minutes, {fare_cents(journey) / 100:.2f} euros. {verdict(trip, journey)}"
    return (
        text
        if len(text) <= LONGEST_REPORT
        else text.removesuffix(" I keep it as the bound until there is a better one.")
    )


class Search:
    """One search, from the wishes to the report."""

    def __init__(self, rng: Random, script: Script, network: Network, trip: Trip, found: list[Journey]) -> None:
        self.rng, self.script, self.network, self.trip = rng, script, network, trip
        ways: dict[Leg, Journey] = {}
        for way in found:
            ways.setdefault(way[0], way)
        self.ways = sorted(ways.values(), key=lambda way: (way[0].arrival, way[0].line, way[0].end))[:LISTED]
        self.these = "These are the branches" if len(ways) <= LISTED else "These are the first branches"

    def begin(self) -> None:
        """Stations, the first board, the branches."""
        rng, script, trip, network = self.rng, self.script, self.trip, self.network
        times = {"start": trip.start, "end": trip.end, "after": clock(trip.after)}
        script.user(_ask(rng, trip))
        stations: list[Call] = [("station", {"name": name}, network.station(name)) for name in (trip.start, trip.end)]
        script.call(say(rng, FIRST_LOOKS, **times), *stations)
        rows = 10
        arguments = {"station": trip.start, "after": clock(trip.after), "rows": rows}
        script.call(say(rng, FIRST_BOARDS, **times), ("board", arguments, network.board(trip.start, trip.after, rows)))
        lines = [
            f"{number}. {way[0].line} at {clock(way[0].train.time)}, change at {way[0].end} ({clock(way[0].arrival)})"
            for number, way in enumerate(self.ways, start=1)
        ]
        script.say("\n".join([say(rng, OPENINGS, these=self.these, **times), *lines, say(rng, ASKS)]))

    def expand(self, journey: Journey) -> None:
        """Follow one journey from board to board, ask for its fare and report it."""
        rng, script, network = self.rng, self.script, self.network
        for here in journey[:-1]:
            minutes = network.change_minutes(here.end)
            ready = here.arrival + minutes
            text = say(rng, CHANGES, minutes=minutes, ready=clock(ready), **_parts(here))
            if here is not journey[0]:
                text = f"From here I take the {here.line} to {here.end}. {text}"
            arguments = {"station": here.end, "after": clock(ready)}
            script.call(text, ("board", arguments, network.board(here.end, ready)))
        remark = say(rng, FARES, **_parts(journey[-1]))
        room = LONGEST_FARE - len(_legs(journey))
        asked = {"legs": [leg.as_json() for leg in journey]}
        script.call(
            remark if len(remark) <= room else SHORT_FARE if len(SHORT_FARE) <= room else None,
            ("fare", asked, {"cents": fare_cents(journey)}),
        )
        script.say(_report(self.trip, journey))

    def miss(self, journey: Journey) -> None:
        """What happens when the last change is missed."""
        rng, script, trip, last = self.rng, self.script, self.trip, journey[-1]
        script.user(say(rng, MISSES, **_parts(last)))
        after = last.train.time + 1
        arguments = {"station": last.start, "after": clock(after)}
        script.call(None, ("board", arguments, self.network.board(last.start, after)))
        others = self.network.journeys(last.start, trip.end, after, changes=1)
        best = min(others, key=lambda way: way[-1].arrival, default=None)
        if best is None:
            script.say(f"Then there is no way to {trip.end} any more that day. I would not risk it.")
            return
        via = f", with a change at {best[0].end}" if len(best) > 1 else ""
        train = f"Then the next way on is the {clock(best[0].train.time)} {best[0].line}{via}."
        lost = best[-1].arrival - last.arrival
        if lost <= 0:
            script.say(f"{train} You would still arrive at {clock(best[-1].arrival)}, so nothing is lost.")
            return
        late = "" if best[-1].arrival <= trip.arrive_by else ", which is too late for you"
        minutes = words.plural(lost, "minute")
        script.say(f"{train} You would arrive at {clock(best[-1].arrival)}, {minutes} later than planned{late}.")

    def second(self, first: Journey) -> None:
        """Another branch: closed if it cannot arrive before the bound, expanded otherwise."""
        number = self.rng.choice([n for n, way in enumerate(self.ways, start=1) if way is not first])
        way = self.ways[number - 1]
        self.script.user(say(self.rng, SECONDS, n=number))
        bound = first[-1].arrival
        if way[0].arrival + self.network.change_minutes(way[0].end) >= bound:
            values = {"n": number, "to": self.trip.end, "bound": clock(bound)}
            self.script.say(say(self.rng, CLOSED, **values, **_parts(way[0])))
        else:
            self.expand(way)


def conversation(rng: Random, name: str) -> Script:
    """A search, or single questions to a timetable."""
    if rng.random() > SEARCHES:
        return questions.conversation(rng, name)
    while True:
        network = any_railway(rng)
        drawn = _trip(rng, network)
        if drawn is None:
            continue
        search = Search(rng, Script(name, SYSTEM, TOOLS), network, *drawn)
        search.begin()
        way = rng.choice(search.ways)
        search.script.user(say(rng, PICKS, n=search.ways.index(way) + 1, **_parts(way[0])))
        search.expand(way)
        room = MAX_MESSAGES - len(search.script.messages)
        if rng.random() < 0.55 and room >= 4:
            search.miss(way)
        elif len(search.ways) > 1 and rng.random() < 0.6 and room >= 2 * LONGEST_WAY + 2:
            search.second(way)
        return search.script
