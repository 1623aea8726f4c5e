"""What people ask of a calendar's keeper. An errand returns False if this calendar has nothing for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from random import Random

from examples_text.script import Script

from conversations.calendar_book import CLOSES, OPENS, ZONES, Book, Event, clock, length
from conversations.toolset import Talk, Toolset
from conversations.words import listed, plural, spoken_day, weekday

YES = ("Yes[|, please|, do that|, go ahead].", "[OK|Fine|Sure], [do that|go ahead].", "[Please|Yes] do.")
NO = ("No, [leave it|never mind|don't].", "[Hm|Oh], then leave it[ as it is|].")


class Desk(Talk):
    """A talk about one Book."""

    def __init__(self, rng: Random, script: Script, toolset: Toolset, book: Book) -> None:
        super().__init__(rng, script, toolset)
        self.book = book

    def a_day(self) -> tuple[date, str]:
        """A day from tomorrow on, and how the user says it."""
        day = self.rng.choice(self.book.days[1:])
        near = ("tomorrow",) if day == self.book.days[1] else ()
        return day, self.rng.choice(
            (f"on {weekday(day)}", f"on {weekday(day)}", f"on {spoken_day(day)}", f"on {day}", *near)
        )

    def spoken(self, day: date) -> str:
        """How the assistant says a day, which is always exact."""
        return f"{weekday(day)}, {day}"

    def look(self, day: date) -> list[Event]:
        """List a day."""
        self.call("list", {"day": str(day), "events": self.book.rows(day)}, day=str(day))
        return self.book.on(day)

    def write(self, title: str, people: list[str], day: date, start: int, minutes: int) -> None:
        """Create an event and say so."""
        event = self.book.add(title, day, start, start + minutes, people)
        guests = {"people": people} if people else {}
        result = {"id": event.id, "status": "booked"}
        self.call("create", result, title=title, day=str(day), start=clock(start), minutes=minutes, **guests)
        told = f" with {listed(people)}" if people else ""
        self.say(
            "[Done|It's booked|All set]: {title}{told} on {day} from {start} to {end}.",
            "{title}{told} is [booked|in the calendar] for {day}, {start} to {end}.",
            title=title,
            told=told,
            day=self.spoken(day),
            start=clock(start),
            end=clock(start + minutes),
        )


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


def book_time(desk: Desk) -> bool:
    """A new event at a given time, which may be taken."""
    book, (day, said) = desk.book, desk.a_day()
    title, people, minutes = book.new_event()
    start = OPENS + 30 * desk.rng.randrange(0, (CLOSES - OPENS - minutes) // 30 + 1)
    told = f" with {listed(people)}" if people else ""
    desk.user(
        "[Please book|Book|Put in|Can you add] {title}{told} {said} at {start}, {length}.",
        "I need {title}{told} {said}, {start}, for {length}.",
        "[Schedule|Set up] a {minutes}-minute slot called {title}{told} {said} at {start}[, please|].",
        title=title,
        told=told,
        said=said,
        start=clock(start),
        length=f"{minutes} minutes",
        minutes=minutes,
    )
    desk.look(day)
    taken = book.in_the_way(day, start, start + minutes)
    if taken is None:
        desk.write(title, people, day, start, minutes)
        return True
    gaps = book.gaps(day, minutes)
    if not gaps:
        desk.say(
            "That time is taken by {taken}, and nothing else is long enough on {day}. Shall I look at another day?",
            taken=taken.spoken(),
            day=desk.spoken(day),
        )
        desk.user(*NO)
        desk.say("All right, I have booked nothing.", "OK. Nothing was changed.")
        return True
    other = next((gap[0] for gap in gaps if gap[0] >= start), gaps[-1][0])
    desk.say(
        "At {start} there is {taken}. {other} would be free. Shall I book that[ instead|]?",
        "[I'm sorry|Sorry], {taken} is in the way. I could book {other} instead. Is that all right?",
        start=clock(start),
        taken=taken.spoken(),
        other=clock(other),
    )
    if desk.chance(0.75):
        desk.user(*YES)
        desk.write(title, people, day, other, minutes)
    else:
        desk.user(*NO)
        desk.say("All right, I have booked nothing.", "OK. Nothing was changed.")
    return True


def find_time(desk: Desk) -> bool:
    """Free times, and one of them booked."""
    book, (day, said) = desk.book, desk.a_day()
    title, people, minutes = book.new_event()
    desk.user(
        "When [am I free|do I have time] for {minutes} minutes {said}?",
        "[Find|Look for] {minutes} free minutes {said}[, please|].",
        "I need {minutes} minutes {said} for {title}. When would that fit?",
        minutes=minutes,
        said=said,
        title=title,
    )
    gaps = book.gaps(day, minutes)
    slots = [{"from": clock(a), "to": clock(b)} for a, b in gaps]
    desk.call("slots", {"day": str(day), "free": slots}, day=str(day), minutes=minutes)
    if not gaps:
        desk.say("There is no free time of {minutes} minutes on {day}.", minutes=minutes, day=desk.spoken(day))
        return True
    free = listed([f"{clock(a)} to {clock(b)}" for a, b in gaps], "or")
    desk.say(
        "On {day} you are free from {free}.",
        "Free on {day}: {free}. Shall I book something?",
        day=desk.spoken(day),
        free=free,
    )
    gap = desk.rng.choice(gaps)
    start = desk.rng.choice((gap[0], gap[0], gap[1] - minutes))
    told = f" with {listed(people)}" if people else ""
    desk.user(
        "[Take|Then book|Book] {start} for {title}{told}, {minutes} minutes.",
        "{start} then: {title}{told}, {minutes} minutes[, please|].",
        start=clock(start),
        title=title,
        told=told,
        minutes=minutes,
    )
    desk.write(title, people, day, start, minutes)
    return True


def move(desk: Desk) -> bool:
    """An event to another time of the same day, or to another day."""
    book = desk.book
    coming = [event for event in book.events if event.day > book.today]
    if not coming:
        return False
    event = desk.rng.choice(coming)
    to = desk.rng.choice([event.day, *book.days[1:]])
    start = desk.rng.choice([OPENS + 30 * n for n in range(17) if OPENS + 30 * n != event.start])
    end = start + event.end - event.start
    same = to == event.day
    when = f"to {clock(start)}" if same else f"to {weekday(to)} at {clock(start)}"
    desk.user(
        "[Move|Please move|Can you move] the {title} {from_day} {when}[|, please].",
        "The {title} {from_day} has to go {when}.",
        title=event.title,
        from_day=f"on {weekday(event.day)}",
        when=when,
    )
    desk.look(event.day)
    if not same:
        desk.look(to)
    taken = book.in_the_way(to, start, end, event)
    if taken is not None:
        gaps = book.gaps(to, event.end - event.start)
        if not gaps:
            desk.say("That does not work: {taken} is there, and nothing else is long enough.", taken=taken.spoken())
            return True
        start = gaps[0][0]
        desk.say(
            "At that time there is {taken}. I could move it to {start} instead. Shall I?",
            taken=taken.spoken(),
            start=clock(start),
        )
        if desk.chance(0.3):
            desk.user(*NO)
            desk.say("All right, the {title} stays at {start}.", title=event.title, start=clock(event.start))
            return True
        desk.user(*YES)
        end = start + event.end - event.start
    event.day, event.start, event.end = to, start, end
    desk.call("move", {"id": event.id, "status": "moved"}, event=event.id, day=str(to), start=clock(start))
    desk.say(
        "[Done|Moved]: the {title} is on {day} from {start} to {end} now.",
        title=event.title,
        day=desk.spoken(to),
        start=clock(start),
        end=clock(end),
    )
    return True


def cancel(desk: Desk) -> bool:
    """Take an event out; ask first if others come."""
    book = desk.book
    coming = [event for event in book.events if event.day > book.today]
    if not coming:
        return False
    event = desk.rng.choice(coming)
    title = event.title
    desk.user(
        "[Cancel|Please cancel|Delete|Take out] the {title} on {day}.",
        "I can't make the {title} on {day}. [Cancel it|Take it out], please.",
        title=title,
        day=weekday(event.day),
    )
    desk.look(event.day)
    if event.people:
        desk.say(
            "The {title} on {day} at {start} is with {who}, who would get a message. Shall I cancel it?",
            title=title,
            day=desk.spoken(event.day),
            start=clock(event.start),
            who=listed(event.people),
        )
        if desk.chance(0.25):
            desk.user(*NO)
            desk.say("OK, the {title} stays.", "All right, nothing was cancelled.", title=title)
            return True
        desk.user(*YES)
    book.events.remove(event)
    desk.call("cancel", {"id": event.id, "status": "cancelled"}, event=event.id)
    desk.say(
        "The {title} on {day} is cancelled{also}.",
        title=title,
        day=desk.spoken(event.day),
        also=f", and {listed(event.people)} will get a message" if event.people else "",
    )
    return True


def invite(desk: Desk) -> bool:
    """One more guest, whose address has to be found; the name may fit two people or nobody."""
    book = desk.book
    coming = [event for event in book.events if event.day > book.today]
    if not coming:
        return False
    event = desk.rng.choice(coming)
    others = [name for name in book.people if name not in event.people]
    who = desk.rng.choice(others)
    first = book.people[who]
    desk.user(
        "[Invite|Please invite|Add] {first} to the {title} on {day}.",
        "Can {first} come to the {title} on {day}? [Send|Please send] an invitation.",
        first=first,
        title=event.title,
        day=weekday(event.day),
    )
    found = [{"name": who, "email": book.emails[who]}]
    kind = desk.rng.choices(("one", "two", "none"), (6, 3, 1))[0]
    if kind == "none":
        desk.call("person", {"people": []}, name=first)
        desk.say("I can't find anybody called {first}. What is the last name, or the e-mail address?", first=first)
        desk.user("{email}", "The address is {email}.", email=book.emails[who])
    elif kind == "two":
        twin = f"{first} {book.firsts[7]}son"
        found.insert(desk.rng.randrange(2), {"name": twin, "email": f"{twin.replace(' ', '.').lower()}@inbox.example"})
        desk.call("person", {"people": found}, name=first)
        desk.say("There are two: {names}. Which one do you mean?", names=listed([row["name"] for row in found]))
        meant = desk.rng.choice(found)
        who = meant["name"]
        book.emails[who] = meant["email"]
        desk.user("{who}[|, please].", "I mean {who}.", who=who)
    else:
        desk.call("person", {"people": found}, name=first)
    desk.look(event.day)
    event.people.append(who)
    desk.call(
        "invite",
        {"id": event.id, "status": "invited", "email": book.emails[who]},
        event=event.id,
        email=book.emails[who],
    )
    desk.say(
        "{who} is invited to the {title} on {day} at {start}.",
        "[Done|I've sent it]: {who} has an invitation to the {title} on {day}, {start}.",
        who=who,
        title=event.title,
        day=desk.spoken(event.day),
        start=clock(event.start),
    )
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


ERRANDS: tuple[Callable[[Desk], bool], ...] = (
    day_ahead,
    ends_of_day,
    book_time,
    find_time,
    move,
    cancel,
    invite,
    elsewhere,
    unknown,
)
