"""What people want changed in a calendar. An errand returns False if this one has nothing for it."""

from __future__ import annotations

from conversations.calendars.book import CLOSES, OPENS, clock
from conversations.calendars.desk import Desk
from conversations.calendars.looks import Errand
from conversations.words import listed, weekday

YES = ("Yes[|, please|, do that|, go ahead].", "[OK|Fine|Sure], [do that|go ahead].", "[Please|Yes] do.")
NO = ("No, [leave it|never mind|don't].", "[Hm|Oh], then leave it[ as it is|].")


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


CHANGES: tuple[Errand, ...] = (book_time, find_time, move, cancel, invite)
