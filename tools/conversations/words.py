"""Names, places, numbers and phrasings: what every generated conversation is made of.

Names are put together from parts, so that there are many more of them than a model can learn by heart.
Must not know: what a conversation is about.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from random import Random

LISTS = Path(__file__).parent / "lists"


def word_list(name: str) -> tuple[str, ...]:
    """The words of one file of lists/."""
    return tuple((LISTS / f"{name}.txt").read_text(encoding="utf-8").split())


GIVEN = word_list("given")
_FAMILY_HEADS = word_list("family_heads")
_FAMILY_TAILS = word_list("family_tails")
_TOWN_HEADS = word_list("town_heads")
_TOWN_TAILS = word_list("town_tails")
_STREETS = word_list("streets")
_STREET_KINDS = ("Lane", "Street", "Walk", "Hill", "Road", "Close", "Avenue", "Yard", "Row", "Parade", "Court")
_PROVIDERS = (
    "postbox", "fastmail", "inbox", "mailhaven", "letterbox", "northmail", "quickpost", "webpost", "mymail", "openmail",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_CHOICE = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")


def vary(rng: Random, text: str) -> str:
    """The text with one of the alternatives of each `[a|b|c]`, which may be nested; other brackets stay."""
    while True:
        drawn = _CHOICE.sub(lambda found: rng.choice(found[1].split("|")), text)
        if drawn == text:
            return text
        text = drawn


def say(rng: Random, texts: Sequence[str], **values: object) -> str:
    """One of the texts, its alternatives drawn by `vary`, then its `{fields}` filled in."""
    return vary(rng, rng.choice(texts)).format(**values)


def given_name(rng: Random) -> str:
    """A first name."""
    return rng.choice(GIVEN)


def family_name(rng: Random) -> str:
    """A last name, put together."""
    return rng.choice(_FAMILY_HEADS) + rng.choice(_FAMILY_TAILS)


def town(rng: Random) -> str:
    """A town, put together."""
    return rng.choice(_TOWN_HEADS) + rng.choice(_TOWN_TAILS)


def postcode(rng: Random, place: str) -> str:
    """A postcode that begins like the town: KB1 7QP."""
    letters = "ABDEFGHJLNPQRSTUWXYZ"
    area = (place[0] + rng.choice(place[1:])).upper()
    return f"{area}{rng.randrange(1, 10)} {rng.randrange(1, 10)}{rng.choice(letters)}{rng.choice(letters)}"


def street(rng: Random) -> str:
    """A house number and a street."""
    return f"{rng.randrange(1, 190)} {rng.choice(_STREETS)} {rng.choice(_STREET_KINDS)}"


def address(rng: Random) -> dict[str, str]:
    """Somewhere to send a parcel: street, town, postcode."""
    place = town(rng)
    return {"street": street(rng), "town": place, "postcode": postcode(rng, place)}


def email(rng: Random, first: str, last: str) -> str:
    """The address of a person; always with a dot before the @."""
    return f"{first}.{last}@{rng.choice(_PROVIDERS)}.example".lower()


def code(rng: Random, pattern: str) -> str:
    """A number by its pattern: 9 is a digit, X a hexadecimal digit, A a capital, the rest stays."""
    draws = {"9": "0123456789", "X": "0123456789abcdef", "A": "ABCDEFGHJKLMNPQRSTUVWXYZ", "8": "123456789"}
    return "".join(rng.choice(draws[mark]) if mark in draws else mark for mark in pattern)


def day(rng: Random) -> date:
    """A day of 2024 to 2026."""
    return date(2024, 1, 8) + timedelta(days=rng.randrange(1000))


def weekday(when: date) -> str:
    """Its name."""
    return WEEKDAYS[when.weekday()]


def spoken_day(when: date) -> str:
    """The day as it is said: 3 March."""
    return f"{when.day} {MONTHS[when.month - 1]}"


def listed(parts: Sequence[str], word: str = "and") -> str:
    """One, two and three."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {word} {parts[-1]}"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """1 file, 2 files."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def euros(cents: int) -> str:
    """An amount as it is said: €12.30."""
    return f"€{cents // 100}.{cents % 100:02d}"
