"""Names, places, numbers and phrasings: what every generated conversation is made of.

Names are put together from parts, so that there are many more of them than a model can learn by heart.
Must not know: what a conversation is about.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, timedelta
from random import Random

GIVEN = tuple(
    """
    Abel Ada Adrian Agnes Aisha Albert Alba Aline Amara Amir Anders Anika Anton Aoife Arjun Astrid Aylin Basil
    Beatriz Bela Bianca Boris Bram Bridget Bruno Callum Camille Carla Cedric Chiara Clara Conrad Cyrus Dalia
    Damian Daria David Delia Desmond Diego Dmitri Dora Edith Efua Elena Elias Elif Elodie Emil Enzo Erik
    Esther Ewan Fabian Farah Felix Fergus Fiona Florian Frieda Gareth Gemma Georg Gita Grace Gregor Greta
    Gustav Hamid Hanna Harriet Hector Heidi Helga Henrik Hugo Ida Idris Ilse Imani Ingrid Irene Isaac Ivana
    Ivo Jakob Jamila Janek Jasper Joana Jonas Josef Judith Julian Kaito Karim Katya Kenji Kira Klara Kofi
    Kwame Lara Leila Lena Leon Lidia Lina Linus Livia Lorenz Lotte Lucas Luisa Magda Malik Manuel Mara Marco
    Maren Marguerite Martin Mateo Matilda Maud Meera Milan Milo Mina Miriam Moritz Nadia Naomi Nestor Nia
    Nico Nils Nina Noor Odile Olaf Olga Omar Oskar Otto Paloma Pavel Pedro Petra Philip Piotr Priya Quentin
    Rafael Rashid Renata Rhea Rikke Rita Robin Rosa Rowan Ruben Ruth Sabine Salma Samuel Sandro Selma Sina
    Simon Sofia Stefan Sunniva Sven Tamara Tariq Tessa Theo Thomas Tilda Tomasz Ulla Uma Valentin Vera
    Viktor Vivian Walter Wanda Wilma Xenia Yara Yusuf Yvonne Zainab Zoe
    """.split()
)
_FAMILY_HEADS = tuple(
    """
    Ald Amber Ash Bar Beck Bell Ber Birk Black Bram Brook Cal Car Chad Clay Cole Crane Dal Dan Del Dorn Drum
    Dun East Elm Fair Fal Far Fel Fen Find Fors Gal Gar Glen Gran Gren Hal Ham Har Hart Has Haw Hazel Heath
    Hol Horn Ing Kal Kel Ken Kil Kor Lam Lang Lar Lind Lock Lun Mal Mar Mel Mer Mid Mor Nor Oak Ol Orm
    Pel Pen Pem Quar Rad Rav Red Ren Rock Ros Row Sal Sand Sel Shel Sol Stan Sten Sund Tal Tarn Thorn Til
    Tor Tren Ul Val Var Vin Wal War Wen West Whit Wil Win Wood Yar
    """.split()
)
_FAMILY_TAILS = tuple(
    """
    ard bach beck berg borg bourne by combe croft dal den don dorf er ero ese evic felt field ford gate
    grave grove gren ham hurst ia ik ini ino ka kin land ley lin lund man mann mark mere mond more nes ney
    ock off oni ova ovic quist ridge rup sen ska son sted stone strand strom ton tore vale ven wald ward
    well wick win wood worth
    """.split()
)
_TOWN_HEADS = tuple(
    """
    Alder Amber Apple Ash Barrow Birch Black Bram Bright Broad Bur Carn Cedar Chal Clear Cold Cor Crow Deep
    Down Drift Eagle East Elder Ever Fair Fal Fern Fin Flint Fox Free Frost Glass Gold Gran Grey Hal Haven
    Hawk Hazel Heather High Hollow Ivy Kes Kings Lark Lead Lin Long Loch Maple Mill Mist Moon Nettle New
    North Oak Otter Penny Pine Quarry Raven Red Rook Rose Rush Sal Sand Scar Sedge Silver Sker Snow South
    Spring Stan Stone Sun Swan Thistle Thorn Tide Upper Wal Weather Well West Wex Whin White Willow Win Wolds
    """.split()
)
_TOWN_TAILS = tuple(
    """
    bay beck bridge brook burn bury by chester cliff combe cross dale den don fell field ford gate ham
    haven head hill holm hurst land leigh ley low marsh mere minster moor mouth ness pool port ridge shaw
    side stead stoke thorpe ton wall water way well wick wold wood worth
    """.split()
)
_STREETS = tuple(
    """
    Orchard Mill Canal Chapel Station Quarry Harbour Larch Weaver North South Bridge Church Garden Park
    School Castle Market River Spring Tower Linden Poplar Saddler Cooper Baker Fisher Rope Lantern Meadow
    Abbey Acorn Barley Beacon Beech Bell Cherry Cobbler Copper Dove Falcon Foundry Glebe Granary Heron
    Juniper Kiln King Laurel Magpie Maltings Nightingale Oxford Paddock Pearl Plum Queen Rectory Sexton
    Summer Tanner Union Victoria Vine Walnut Wharf Windmill
    """.split()
)
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
