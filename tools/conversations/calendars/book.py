"""Book: a person's calendar for some days: what is in it, who takes part, what is free. Must not know: what is said."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, timedelta
from random import Random
from typing import Any

from conversations import words

TITLES = (
    "Budget review", "Design review", "Team meeting", "Weekly planning", "Project kick-off", "Stand-up",
    "Job interview",
    "Lunch", "Dentist", "Sales call", "Training", "Demo", "Retrospective", "Board meeting", "Site visit", "Coffee chat",
    "Parents' evening", "Physiotherapy", "Piano lesson", "Code review", "Release meeting", "Supplier call",
    "Performance talk", "Workshop", "Rehearsal", "Fire drill", "Press briefing", "Contract talk", "Data review",
    "Roadmap session", "Editorial meeting", "Lab tour", "Phone call", "Haircut", "Car service", "Swimming", "Choir",
    "Audit", "Onboarding", "Town hall", "Hiring round", "Market update", "Menu tasting", "Garden walk", "Reading group",
)  # fmt: skip
PLACES = ("Room 1", "Room 2", "Room 12", "Room 204", "the library", "the canteen", "the big hall", "the lab", "online")
ZONES = {
    "Europe/Lisbon": 0, "Europe/London": 0, "Europe/Paris": 1, "Europe/Berlin": 1, "Europe/Warsaw": 1,
    "Europe/Athens": 2, "Europe/Helsinki": 2, "Africa/Nairobi": 3, "Asia/Dubai": 4, "Asia/Kolkata": 5.5,
    "Asia/Bangkok": 7, "Asia/Singapore": 8, "Asia/Tokyo": 9, "Australia/Brisbane": 10, "America/New_York": -5,
    "America/Chicago": -6, "America/Denver": -7, "America/Los_Angeles": -8, "America/Sao_Paulo": -3,
}  # fmt: skip
OPENS, CLOSES = 8 * 60, 18 * 60  # minutes of the day


def clock(minute: int) -> str:
    """Minutes of the day as 09:30."""
    return f"{minute // 60:02d}:{minute % 60:02d}"


def length(minutes: int) -> str:
    """45 minutes, 1 hour, 2 hours and 30 minutes."""
    hours, rest = divmod(minutes, 60)
    parts = [words.plural(hours, "hour")] if hours else []
    return words.listed(parts + ([words.plural(rest, "minute")] if rest or not hours else []))


@dataclass
class Event:
    """One entry; start and end are minutes of its day."""

    id: str
    title: str
    day: date
    start: int
    end: int
    people: list[str] = field(default_factory=list)
    place: str | None = None

    def spoken(self) -> str:
        """Title with its times."""
        return f"{self.title} from {clock(self.start)} to {clock(self.end)}"


class Book:
    """Seven days from today on, and the people who are written to."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.today = words.day(rng)
        self.days = [self.today + timedelta(days=n) for n in range(7)]
        self.owner = words.given_name(rng)
        self.zone = rng.choice(list(ZONES))
        self.titles = rng.sample(TITLES, len(TITLES))
        self.id = words.code(rng, rng.choice(("ev-9", "E99", "XXX", "evt_", "9")))
        self.numbers = rng.sample(range(100, 1000), 100)  # the ends of the ids
        self.firsts = rng.sample(words.GIVEN, 12)
        self.people = {f"{first} {words.family_name(rng)}": first for first in self.firsts[:6]}
        self.emails = {name: words.email(rng, *name.split()) for name in self.people}
        self.events: list[Event] = []
        for day in self.days:
            self._fill(day)

    def _fill(self, day: date) -> None:
        """Some events one after the other."""
        at = OPENS + 30 * self.rng.randrange(0, 5)
        for _ in range(self.rng.choice((0, 1, 1, 2, 2, 3, 3, 4))):
            long = self.rng.choice((30, 30, 45, 60, 60, 90, 120))
            if at + long > CLOSES or not self.titles:
                break
            self.add(self.titles.pop(), day, at, at + long, self.some_people())
            at += long + 30 * self.rng.randrange(0, 5) + (30 - long % 30) % 30

    def some_people(self) -> list[str]:
        """Nobody, one or two."""
        return self.rng.sample(list(self.people), self.rng.choice((0, 0, 1, 1, 2)))

    def add(self, title: str, day: date, start: int, end: int, people: list[str]) -> Event:
        """Write an event."""
        place = self.rng.choice(PLACES) if self.rng.random() < 0.4 else None
        event = Event(f"{self.id}{self.numbers.pop()}", title, day, start, end, people, place)
        self.events.append(event)
        return event

    def on(self, day: date) -> list[Event]:
        """The events of a day, earliest first."""
        return sorted((event for event in self.events if event.day == day), key=lambda event: event.start)

    def in_the_way(self, day: date, start: int, end: int, but: Event | None = None) -> Event | None:
        """The first event that overlaps with the time from start to end."""
        return next((e for e in self.on(day) if e is not but and e.start < end and start < e.end), None)

    def gaps(self, day: date, minutes: int) -> list[tuple[int, int]]:
        """The free times of a day that are long enough."""
        found, at = [], OPENS
        for event in self.on(day):
            if event.start - at >= minutes:
                found.append((at, event.start))
            at = max(at, event.end)
        return found + ([(at, CLOSES)] if CLOSES - at >= minutes else [])

    def new_event(self) -> tuple[str, list[str], int]:
        """A title that is not in the calendar, people, and minutes."""
        return self.titles.pop(), self.some_people(), self.rng.choice((30, 45, 60, 90))

    def row(self, event: Event) -> dict[str, Any]:
        """The event as the calendar's functions return it."""
        row = {"id": event.id, "title": event.title, "start": clock(event.start), "end": clock(event.end)}
        return {**row, "people": list(event.people), **({"place": event.place} if event.place else {})}

    def rows(self, day: date) -> list[dict[str, Any]]:
        """A whole day."""
        return [self.row(event) for event in self.on(day)]
