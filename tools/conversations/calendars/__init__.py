"""Conversations of an assistant that keeps a calendar: what is there, what is free, booking, moving, cancelling.

Must not know: how a conversation becomes tokens.
"""

from __future__ import annotations

from random import Random

from examples_text.script import Script

from conversations import words
from conversations.calendars.book import CLOSES, OPENS, Book, clock
from conversations.calendars.changes import CHANGES
from conversations.calendars.desk import Desk
from conversations.calendars.looks import LOOKS
from conversations.plain.small_talk import greet
from conversations.toolset import DAY, INTEGER, STRINGS, Function, Toolset, may, needs
from conversations.words import say

ERRANDS = (*LOOKS, *CHANGES)
GREETED = 0.08  # of the conversations begin with hello alone
MAX_MESSAGES = 20
THE_DAY = needs("day|date|on_day", "The day, as YYYY-MM-DD.|A date such as 2025-04-30.", DAY)
THE_EVENT = needs("event|event_id|id", "The id of the event.|Which event; list a day to see the ids.")
FUNCTIONS = {
    "list": Function(
        "list_events|show_day|get_agenda|read_calendar|events_on",
        "The events of one day, earliest first.|Everything in the calendar on a day, with ids.|List a day's events.",
        {"day": THE_DAY},
    ),
    "slots": Function(
        "find_slots|free_times|find_time|get_free_slots|search_slots",
        "Free times of a day that are long enough.|Where a meeting of so many minutes would fit on a day.",
        {"day": THE_DAY, "minutes": needs("minutes|duration|length_minutes", "How long, in minutes.", INTEGER)},
    ),
    "create": Function(
        "create_event|book|add_event|schedule_event|new_event",
        "Write a new event. Returns its id.|Book a time.|Add an event and send the invitations.",
        {
            "title": needs("title|name|subject", "What it is called.|The title of the event."),
            "day": THE_DAY,
            "start": needs("start|start_time|from_time", "When it begins, as HH:MM.|The first minute, HH:MM."),
            "minutes": needs("minutes|duration|length_minutes", "How long, in minutes.", INTEGER),
            "people": may("people|guests|attendees", "Names of those who are invited.|Who takes part.", STRINGS),
        },
    ),
    "move": Function(
        "move_event|reschedule|shift_event|change_time",
        "Put an event on another day or time.|Move an event; the guests are told.",
        {"event": THE_EVENT, "day": THE_DAY, "start": needs("start|start_time|new_start", "When it begins, as HH:MM.")},
    ),
    "cancel": Function(
        "cancel_event|delete_event|remove_event",
        "Take an event out; guests get a message.|Cancel an event.",
        {"event": THE_EVENT},
    ),
    "invite": Function(
        "invite|add_guest|invite_person|add_attendee",
        "Invite one more person to an event.|Send an invitation.",
        {"event": THE_EVENT, "email": needs("email|address|guest_email", "The e-mail address of the guest.")},
    ),
    "person": Function(
        "find_person|search_contacts|lookup_contact|find_contact",
        "People whose name fits, with their e-mail addresses.|Look somebody up by name.",
        {"name": needs("name|query|person", "A first name, a last name or both.")},
    ),
    "convert": Function(
        "convert_time|time_in_zone|to_time_zone",
        "What time it is elsewhere at a given time here.|Turn a local time into that of another time zone.",
        {
            "time": needs("time|at|local_time", "The time here, as HH:MM."),
            "zone": needs("zone|time_zone|target_zone", "A time zone such as Europe/Paris."),
        },
    ),
}
OTHERS = (
    Function("set_reminder|remind_me", "A message at a given time.", {"text": needs("text", "What to say.")}),
    Function("weather|get_weather", "The weather of a place.", {"place": needs("place|city", "A town.")}),
    Function(
        "send_message|write_email", "Send a message.", {"to": needs("to", "Who."), "text": needs("text", "What.")}
    ),
)
ROLES = (
    "You [are|act as] the calendar assistant of {owner}.",
    "You keep {owner}'s calendar[| and answer by chat].",
    "You are an assistant that plans meetings for {owner}.",
    "You help {owner} with [appointments|meetings and appointments|the calendar].",
)
DATES = (
    "Today is {weekday}, {today}. The next days are {week}.",
    "It is {weekday}, {today}. This is the week: {week}.",
    "Current date: {today} ({weekday}). Days: {week}.",
)
RULES = (
    "Look at the day before you book or move anything.",
    "Never book two things at the same time.",
    "Ask before you cancel something that others take part in.",
    "Be brief and friendly.",
    "Use the 24-hour clock.",
    "Answer in one or two sentences.",
    "If several people fit a name, ask which one is meant.",
    "Say what you have done, with day and time.",
    "Do not guess; use the functions.",
    "If a time is taken, say by what, and offer another.",
    "Times are local times in {zone}.",
    "The working day is from {opens} to {closes}.",
)
ENDS = (
    (
        "[Thanks|Thank you][, that's all|, that was it|. That's everything].",
        "You're welcome, {owner}[.|!| Have a good day.]",
    ),
    ("[Great|Perfect|Good], thanks!", "[Gladly|You're welcome], {owner}."),
)


def system(rng: Random, book: Book) -> str:
    """Who the assistant is, what day it is, and some rules in any order."""
    week = ", ".join(f"{words.weekday(day)[:3]} {day}" for day in book.days)
    rules = rng.sample(RULES, rng.randrange(2, len(RULES)))
    joined = "\n".join(f"- {rule}" for rule in rules) if rng.random() < 0.4 else " ".join(rules)
    text = f"{rng.choice(ROLES)} {rng.choice(DATES)}{rng.choice((' ', chr(10)))}{joined}"
    values = {"owner": book.owner, "zone": book.zone, "opens": clock(OPENS), "closes": clock(CLOSES)}
    return say(rng, (text,), **values, weekday=words.weekday(book.today), today=book.today, week=week)


def conversation(rng: Random, name: str) -> Script:
    """One conversation of one to four errands."""
    book = Book(rng)
    toolset = Toolset(rng, FUNCTIONS, OTHERS)
    script = Script(name, system(rng, book), toolset.tools)
    desk = Desk(rng, script, toolset, book)
    if rng.random() < GREETED:
        greet(desk)
    for errand in rng.sample(ERRANDS, rng.choice((1, 1, 2, 2, 3, 4))):
        before = list(script.messages)
        if not errand(desk) or len(script.messages) > MAX_MESSAGES:
            script.messages = before
            break
    if len(script.messages) == 1:
        ERRANDS[0](desk)
    if rng.random() < 0.3 and len(script.messages) <= MAX_MESSAGES - 2:
        said, answer = rng.choice(ENDS)
        desk.user(said)
        desk.say(answer, owner=book.owner)
    return script
