"""Things, colours, animals and jobs that plain talks are about."""

from __future__ import annotations

THINGS = (
    "apples",
    "milk",
    "bread",
    "eggs",
    "flour",
    "butter",
    "cheese",
    "rice",
    "tea",
    "coffee",
    "honey",
    "salt",
    "soap",
    "candles",
    "paper",
    "pens",
    "tape",
    "screws",
    "paint",
    "batteries",
    "towels",
    "plates",
    "cups",
    "spoons",
    "boxes",
    "lamps",
    "chairs",
    "books",
    "stamps",
    "flowers",
    "seeds",
    "gloves",
    "socks",
    "shirts",
    "tickets",
    "maps",
    "nails",
    "onions",
    "carrots",
    "lemons",
    "pears",
    "nuts",
    "oats",
    "beans",
    "olive oil",
    "pepper",
    "sugar",
    "yoghurt",
    "plums",
)
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "grey", "brown", "orange", "purple", "pink", "silver")
ANIMALS = ("cat", "dog", "horse", "rabbit", "parrot", "goat", "hamster", "tortoise", "pony", "canary", "ferret", "hen")
JOBS = (
    "teacher",
    "nurse",
    "baker",
    "pilot",
    "gardener",
    "joiner",
    "cook",
    "driver",
    "painter",
    "doctor",
    "tailor",
    "farmer",
    "librarian",
    "plumber",
    "translator",
    "roofer",
    "potter",
    "welder",
    "clerk",
    "musician",
)
COUNTED = tuple(thing for thing in THINGS if thing.endswith("s"))
PLACES = ("the attic", "the kitchen", "the garage", "the cellar", "the car", "the office", "the shed", "the hall")


def a(noun: str) -> str:
    """The noun with its article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
