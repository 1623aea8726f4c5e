"""Search in a small collection of notes that is drawn: search, open, answer with the fact and its source.

Must not know: other domains.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from examples_text.script import Script, function

from conversations import words
from conversations.words import listed, say


@dataclass(frozen=True)
class Note:
    """A document: its number, its title, and facts as key and value; `subject` is what it is about."""

    number: str
    subject: str
    title: str
    facts: dict[str, str]

    def text(self, rng: Random) -> str:
        """The document, one sentence for each fact."""
        rows = [say(rng, ("The {key} is {value}.", "{start}: {value}."), key=key, start=key.capitalize(), value=value)
                for key, value in self.facts.items()]  # fmt: skip
        return f"{self.title}\n{' '.join(rows)}"


THINGS = {
    "museum": ("opening time", "ticket price", "director", "year of opening", "telephone number"),
    "boiler": ("water pressure", "service interval", "serial number", "installer", "next inspection"),
    "contract": ("monthly fee", "end date", "notice period", "contact person", "contract number"),
    "meeting room": ("number of seats", "floor", "door code", "person in charge", "projector type"),
    "walking route": ("length", "highest point", "starting place", "walking time", "bus line"),
    "bread recipe": ("baking time", "oven temperature", "amount of flour", "resting time", "amount of water"),
    "server": ("address", "owner", "backup time", "memory size", "operating system"),
    "book": ("author", "shelf", "number of pages", "year", "return date"),
}
SYSTEMS = (
    "You answer from the [notes|documents] of {place}, and from nothing else. [Search, then open the best hit|Search "
    "first, open what fits]. [Name the source|Always give the number of the document]. [Be brief|Keep it short].",
    "You are {name}, [librarian|archivist] of a small [office|club|firm]. [If it is not in the documents, say so|Do "
    "not answer from memory]. [Give the source in brackets|Say where you have it from].",
)
ASKS = (
    "What is the {key} of {subject}?",
    "[Do you know|Can you tell me] the {key} of {subject}?",
    "[Please look up|Look up] the {key} of {subject}.",
    "I need the {key} [for|of] {subject}.",
)
SAYS = (
    "The {key} is {value} ({number}).",
    "{value}, [according to|says] {number}.",
    "The {key} of {subject} is {value}. Source: {number}.",
)
AGAIN = ("And the {key}?", "[Thanks|Thank you]. [And|Also] the {key}[, please|]?")
MISSING = (
    "{number} does not say what the {key} is. It has the {known}.",
    "That is not in {number}. I find only the {known} there.",
)
NOTHING = (
    "I find no document about {subject}, so I can't say.",
    "There is nothing about {subject} in the documents. [Could it have another name|Is the name right]?",
)
REMARKS = (None, None, "I open {number}.", "{number} looks right.")


def _value(rng: Random, key: str) -> str:
    """A value that fits the key, as far as a value has a form."""
    if key in ("director", "installer", "contact person", "person in charge", "owner", "author"):
        return f"{words.given_name(rng)} {words.family_name(rng)}"
    if "time" in key and key not in ("baking time", "resting time", "walking time"):
        return f"{rng.randrange(6, 23):02d}:{rng.choice((0, 15, 30, 45)):02d}"
    if "date" in key or key == "next inspection":
        return words.spoken_day(words.day(rng))
    if key in ("serial number", "contract number", "door code", "address", "telephone number", "shelf"):
        return words.code(rng, rng.choice(("A-9999", "99-999", "8999X", "AA-99")))
    if key in ("ticket price", "monthly fee"):
        return words.euros(rng.randrange(300, 9000))
    if key == "starting place":
        return words.town(rng)
    units = {
        "water pressure": "bar", "service interval": "months", "notice period": "weeks", "length": "km",
        "highest point": "m", "walking time": "hours", "baking time": "minutes", "oven temperature": "°F",
        "amount of flour": "g", "resting time": "minutes", "amount of water": "ml", "memory size": "GB",
    }  # fmt: skip
    number = rng.randrange(2, 60) if "amount" not in key and "oven" not in key else 10 * rng.randrange(15, 60)
    if "year" in key:
        number = rng.randrange(1880, 2024)
    return f"{number} {units[key]}" if key in units else str(number)


def _notes(rng: Random) -> list[Note]:
    """A few documents about things of different kinds."""
    made = []
    pattern = rng.choice(("D-999", "N999", "doc-99", "9999/9"))
    for kind in rng.sample(list(THINGS), rng.randrange(2, 5)):
        subject = f"the {kind} {words.town(rng)}"
        keys = rng.sample(THINGS[kind], rng.randrange(3, 5))
        facts = {key: _value(rng, key) for key in keys}
        title = subject[4:5].upper() + subject[5:]
        made.append(Note(words.code(rng, pattern), subject, title, facts))
    return made


def conversation(rng: Random, name: str) -> Script:
    """One or two questions to a collection of notes."""
    notes = _notes(rng)
    search = rng.choice(("search", "find_documents", "search_notes", "lookup"))
    opens = rng.choice(("open", "read_document", "get_note", "fetch"))
    key_of_search, key_of_open = rng.choice(("query", "text", "words")), rng.choice(("number", "id", "document"))
    tools = [
        function(search, "Documents that fit some words, the best first.", {key_of_search: "What to look for."}),
        function(opens, "The text of one document.", {key_of_open: "Its number, as the search gives it."}),
    ]
    system = say(rng, SYSTEMS, place=words.town(rng), name=words.given_name(rng))
    script = Script(name, system, rng.sample(tools, 2))
    for note in rng.sample(notes, rng.choice((1, 1, 2))):
        asked = list(note.facts)
        key = rng.choice(asked)
        script.user(say(rng, ASKS, key=key, subject=note.subject))
        query = note.title[:1].lower() + note.title[1:]
        if rng.random() < 0.12:
            script.call(None, (search, {key_of_search: query}, {"hits": []}))
            script.say(say(rng, NOTHING, subject=note.subject))
            continue
        others = [other for other in notes if other is not note][: rng.randrange(0, 3)]
        hits = [{"number": one.number, "title": one.title} for one in (note, *others)]
        script.call(None, (search, {key_of_search: query}, {"hits": hits}))
        remark = rng.choice(REMARKS)
        said = remark.format(number=note.number) if remark else None
        script.call(said, (opens, {key_of_open: note.number}, note.text(rng)))
        script.say(say(rng, SAYS, key=key, value=note.facts[key], number=note.number, subject=note.subject))
        kind = next(kind for kind in THINGS if note.subject.startswith(f"the {kind} "))
        if rng.random() < 0.5:
            other = rng.choice([one for one in THINGS[kind] if one != key])
            script.user(say(rng, AGAIN, key=other))
            if other in note.facts:
                script.say(say(rng, SAYS, key=other, value=note.facts[other], number=note.number, subject=note.subject))
            else:
                script.say(say(rng, MISSING, key=other, number=note.number, known=listed(list(note.facts))))
    return script
