"""Desk: a talk between the owner of one calendar and who keeps it. Must not know: what the owner wants."""

from __future__ import annotations

from datetime import date
from random import Random

from examples_text.script import Script

from conversations.calendars.book import Book, Event, clock
from conversations.toolset import Talk, Toolset
from conversations.words import listed, spoken_day, weekday


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
