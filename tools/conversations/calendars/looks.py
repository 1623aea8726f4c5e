"""What people ask about a calendar without changing it. An errand returns False if this one has nothing for it."""

from __future__ import annotations

from collections.abc import Callable

from conversations.calendars.book import OPENS, ZONES, clock, length
from conversations.calendars.desk import Desk
from conversations.words import listed, plural

Errand = Callable[[Desk], bool]


def day_ahead(desk: Desk) -> bool:
    """What is on."""
    day, said = desk.a_day()
    desk.user(
        "What [do I have|is] {said}?",
        "[Show me|Tell me] what's [on|planned] {said}[, please|].",
        "[Am I busy|Do I have anything] {said}?",
        said=said,
    )
    events = desk.look(day)
    if not events:
        desk.say("Nothing: {day} is free.", "{day} is empty[, you have the whole day|].", day=desk.spoken(day))
        return True
    desk.say(
        "On {day} you have {count}: {events}.",
        "{count} on {day}: {events}.",
        day=desk.spoken(day),
        count=plural(len(events), "event"),
        events=listed([e.spoken() for e in events]),
    )
    if desk.chance(0.5):
        with_people = [event for event in events if event.people]
        if with_people:
            event = desk.rng.choice(with_people)
            desk.user("Who [is|takes part] in the {title}?", "Who comes to the {title}?", title=event.title)
            desk.say("{who}.", "That is with {who}.", who=listed(event.people))
        else:
            desk.user("[When|At what time] does the {title} end?", title=events[-1].title)
            desk.say("At {end}.", "The {title} ends at {end}.", title=events[-1].title, end=clock(events[-1].end))
    return True


def ends_of_day(desk: Desk) -> bool:
    """The first or the last event, or how much time all of them take."""
    day, said = desk.a_day()
    asks = desk.rng.choice(("first", "last", "total"))
    if asks == "total":
        desk.user(
            "How [much time|many hours] do I spend in meetings {said}?",
            "How long are my events {said} in all?",
            said=said,
        )
    else:
        desk.user(
            "When does my {asks} [event|meeting] {verb} {said}?",
            asks=asks,
            said=said,
            verb="start" if asks == "first" else "end",
        )
    events = desk.look(day)
    if not events:
        desk.say("You have no events on {day}.", "There is nothing in the calendar on {day}.", day=desk.spoken(day))
    elif asks == "total":
        lengths = [event.end - event.start for event in events]
        total = length(sum(lengths))
        sums = f": {' + '.join(map(str, lengths))} minutes" if len(lengths) > 1 else ""
        desk.say("{total} in all{sums}.", "It is {total} on {day}{sums}.", total=total, sums=sums, day=desk.spoken(day))
    elif asks == "first":
        desk.say(
            "Your first event is {title}, at {at}.",
            "At {at}, with {title}.",
            title=events[0].title,
            at=clock(events[0].start),
        )
    else:
        desk.say("Your last event is {title}, and it ends at {at}.", title=events[-1].title, at=clock(events[-1].end))
    return True


def elsewhere(desk: Desk) -> bool:
    """What time it is in another place."""
    book = desk.book
    zone = desk.rng.choice([zone for zone in ZONES if zone != book.zone])
    city = zone.split("/")[1].replace("_", " ")
    here = OPENS + 30 * desk.rng.randrange(0, 20)
    there = round(here + (ZONES[zone] - ZONES[book.zone]) * 60)
    day = ["the day before", "the same day", "the next day"][there // 1440 + 1]
    desk.user(
        "What time is it in {city} [when it is {time} here|at {time} our time]?",
        "We start at {time}. When is that [in|for the people in] {city}?",
        city=city,
        time=clock(here),
    )
    result = {"time": clock(there % 1440), "zone": zone, "day": day}
    desk.call("convert", result, time=clock(here), zone=zone)
    desk.say(
        "{time} here is {there} in {city}, {day}.",
        "In {city} it is {there} then, {day}.",
        time=clock(here),
        there=clock(there % 1440),
        city=city,
        day=day,
    )
    return True


def unknown(desk: Desk) -> bool:
    """An event that is not there."""
    title = desk.book.titles.pop()
    day, said = desk.a_day()
    desk.user(
        "[When is|What time is] the {title} {said}?",
        "[Cancel|Take out] the {title} {said}[|, please].",
        title=title,
        said=said,
    )
    events = desk.look(day)
    there = f"I see {listed([e.spoken() for e in events])}." if events else "The day is empty."
    desk.say(
        "I can't find the {title} on {day}. {there}",
        "There is no {title} on {day}. {there}",
        title=title,
        day=desk.spoken(day),
        there=there,
    )
    return True


LOOKS: tuple[Errand, ...] = (day_ahead, ends_of_day, elsewhere, unknown)
