"""Short exchanges about what the user has just said: it is remembered, found again, counted and compared.

Must not know: functions; there are none in these talks.
"""

from __future__ import annotations

from collections.abc import Callable

from conversations import words
from conversations.toolset import Talk
from conversations.words import listed

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
ORDINALS = ("first", "second", "third", "fourth", "fifth")
NOTED = (
    "[OK|All right|Good|Got it], I'll remember that.",
    "[Noted|Understood|Got it].",
    "[Thanks|Thank you], I've got it.",
)


def a(noun: str) -> str:
    """The noun with its article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def name_and_place(talk: Talk) -> None:
    """Who the user is, and what was said about it."""
    rng = talk.rng
    name, town, job, age = words.given_name(rng), words.town(rng), rng.choice(JOBS), rng.randrange(18, 90)
    parts = {
        "name": (
            (f"my name is {name}", f"I'm {name}"),
            ("What['s| is] my name?", "Who am I?"),
            f"Your name is {name}.",
        ),
        "town": (
            (f"I live in {town}", f"I come from {town}"),
            ("Where do I live?", "Which town [am I|do I come] from?"),
            rng.choice((f"You live in {town}.", f"{town}, you said.")),
        ),
        "job": (
            (f"I work as {a(job)}", f"I'm {a(job)}"),
            ("What is my job?", "What do I do for a living?"),
            f"You're {a(job)}.",
        ),
        "age": ((f"I'm {age} years old", f"I'm {age}"), ("How old am I?",), f"You're {age} years old."),
    }
    told = rng.sample(list(parts), rng.randrange(1, 4))
    text = listed([rng.choice(parts[key][0]) for key in told])
    talk.user(
        "[Hi|Hello|Good morning], {text}.", "[|Hello! ]{first}{rest}.", text=text, first=text[0].upper(), rest=text[1:]
    )
    if "name" in told:
        talk.say("[Nice to meet you|Hello|Hi], {name}! [How can I help you|What can I do for you]?", name=name)
    else:
        talk.say("[Thanks for telling me|Hello|Nice to meet you]! [How can I help you|What can I do for you]?")
    for key in rng.sample(told, rng.randrange(1, len(told) + 1)):
        talk.user(*parts[key][1])
        talk.say(parts[key][2])
    if rng.random() < 0.3:
        missing = rng.choice([key for key in parts if key not in told])
        talk.user(*parts[missing][1])
        talk.say(
            "You haven't told me[ that| yet].",
            "I don't know, you haven't said[| it].",
            "I can't know that: you haven't told me.",
        )


def number(talk: Talk) -> None:
    """A code, a phone number or an amount that is asked for later."""
    rng = talk.rng
    what, pattern = rng.choice(
        (
            ("door code", "9999"),
            ("booking number", "AA-99999"),
            ("phone number", "0899 999999"),
            ("PIN", "9999"),
            ("locker number", "89"),
            ("order number", "899999"),
            ("licence plate", "AA 999 A"),
            ("seat", "89A"),
            ("ticket number", "A999999"),
            ("account number", "8999-999-9"),
            ("serial number", "XXXX-XXXX"),
            ("room", "899"),
        )
    )
    value = words.code(rng, pattern)
    talk.user(
        "[My|The] {what} is {value}. [Remember it.|Please remember that.|Can you remember it?]",
        "{value} is [my|the] {what}.[| Remember it, please.]",
        what=what,
        value=value,
    )
    talk.say(*NOTED, "[OK|All right]: the {what} is {value}.", what=what, value=value)
    if rng.random() < 0.4:
        new = words.code(rng, pattern)
        talk.user("[Sorry, that was wrong|I made a mistake|No, wait]: [it is|it's] {new}.", new=new)
        talk.say("[OK|Thanks], {new} then.", "[No problem|All right]. The {what} is {new}.", new=new, what=what)
        value = new
    talk.user(
        "What [is|was] [my|the] {what}[ again|]?",
        "[Tell me|Can you tell me] the {what}[ again|], please[.|?]",
        what=what,
    )
    talk.say("{value}.", "The {what} is {value}.", "It is {value}.", value=value, what=what)


def shopping(talk: Talk) -> None:
    """A list: repeated, counted, one of it found, something added or taken out."""
    rng = talk.rng
    things = rng.sample(THINGS, rng.randrange(2, 6))
    talk.user(
        "[I need|We need|I have to buy|On my list there are] {things}.",
        "My list: {bare}.",
        things=listed(things),
        bare=", ".join(things),
    )
    talk.say(*NOTED, "{count}: {things}.", count=words.plural(len(things), "thing").capitalize(), things=listed(things))
    for step in rng.sample(("nth", "count", "add", "remove"), rng.randrange(1, 4)):
        if step == "nth":
            index = rng.randrange(len(things))
            talk.user(
                "What is the {nth} [thing|one] on [the|my] list?",
                "Which one is {nth}?",
                nth=ORDINALS[index] if index < 5 else "last",
            )
            talk.say(
                "{thing}.",
                "The {nth} one is {low}.",
                thing=things[index].capitalize(),
                low=things[index],
                nth=ORDINALS[index] if index < 5 else "last",
            )
        elif step == "count":
            talk.user("How many [things|items] are [on the list|there]?")
            talk.say(
                "{count}.",
                "There are {number}: {things}.",
                count=words.plural(len(things), "thing").capitalize(),
                number=len(things),
                things=listed(things),
            )
        elif step == "add":
            new = rng.choice([thing for thing in THINGS if thing not in things])
            things.append(new)
            talk.user("[Add|And] {new}[, please|].", new=new)
            talk.say("[OK|Done]. The list is now {things}.", "{things}.", things=listed(things))
        elif len(things) > 1:
            gone = things.pop(rng.randrange(len(things)))
            talk.user("[Leave out|Take out|Remove] the {gone}.", "I don't need {gone} after all.", gone=gone)
            talk.say("[OK|Done]. That leaves {things}.", things=listed(things))


def passage(talk: Talk) -> None:
    """A few sentences and questions about them."""
    rng = talk.rng
    names = rng.sample(words.GIVEN, 3)
    facts: list[tuple[str, str, str]] = []
    for name in names:
        animal, colour, town = rng.choice(ANIMALS), rng.choice(COLOURS), words.town(rng)
        place, hour, count, job = rng.choice(PLACES), rng.randrange(6, 22), rng.randrange(2, 40), rng.choice(JOBS)
        thing = rng.choice(COUNTED)
        facts += rng.sample(
            (
                (
                    f"{name} has {a(colour)} {animal}.",
                    f"What [animal|pet] does {name} have?",
                    f"{name} has {a(colour)} {animal}.",
                ),
                (f"{name} lives in {town}.", f"Where does {name} live?", f"{name} lives in {town}."),
                (f"{name} works as {a(job)}.", f"What [does {name} do|is {name}'s job]?", f"{name} works as {a(job)}."),
                (f"{name} arrives at {hour}:00.", f"When does {name} [arrive|come]?", f"{name} arrives at {hour}:00."),
                (f"{name} is in {place}.", f"Where is {name}?", f"{name} is in {place}."),
                (f"{name} bought {count} {thing}.", f"What did {name} buy?", f"{name} bought {count} {thing}."),
                (
                    f"{name}'s favourite colour is {colour}.",
                    f"What colour does {name} like[ most|]?",
                    f"{name} likes {colour} most.",
                ),
                (f"{name} is {count + 10} years old.", f"How old is {name}?", f"{name} is {count + 10} years old."),
            ),
            rng.choice((1, 1, 2)),
        )
    rng.shuffle(facts)
    facts = facts[: rng.randrange(1, 6)]
    text = " ".join(fact for fact, _, _ in facts)
    asked = rng.sample(facts, rng.randrange(1, len(facts) + 1))[:3]
    talk.user(
        "{text} {question}",
        "[Read this|Here is a text]: {text} {question}",
        "{question} {text}",
        text=text,
        question=words.vary(rng, asked[0][1]),
    )
    talk.say(asked[0][2])
    for _, question, answer in asked[1:]:
        talk.user(question)
        talk.say(answer)
    if rng.random() < 0.25:
        stranger = rng.choice([name for name in words.GIVEN if name not in names])
        talk.user("And {who}?", "[Where|Who] is {who}?", "What about {who}?", who=stranger)
        talk.say(
            "You haven't [told me anything|said anything] about {who}.",
            "I don't know anything about {who}.",
            who=stranger,
        )


def repeat(talk: Talk) -> None:
    """Words or numbers said again as they were."""
    rng = talk.rng
    made = {
        "words": lambda: " ".join(rng.sample(THINGS + COLOURS + ANIMALS, rng.randrange(2, 6))),
        "person": lambda: f"{words.given_name(rng)} {words.family_name(rng)}",
        "address": lambda: ", ".join(words.address(rng).values()),
        "code": lambda: words.code(rng, rng.choice(("AAA-999", "99999999", "XXXXXXXX", "A9A9A9", "999 999 999"))),
        "email": lambda: words.email(rng, words.given_name(rng), words.family_name(rng)),
    }
    text = made[rng.choice(list(made))]()
    talk.user(
        "[Repeat|Say|Write|Please repeat]: {text}", "[Repeat|Say] after me: {text}", 'Say "{text}"[.|]', text=text
    )
    talk.say(text.replace("[", "(").replace("{", "("))


def compare(talk: Talk) -> None:
    """Two numbers, or a small sum."""
    rng = talk.rng
    first, second = rng.sample(range(1, 100), 2)
    if rng.random() < 0.5:
        more = rng.random() < 0.5
        word = rng.choice(("larger", "bigger", "greater") if more else ("smaller", "less"))
        talk.user("[Which|What] is {word}, {a} or {b}?", a=first, b=second, word=word)
        talk.say(
            "{x}.",
            "{x} is {word}[ than {y}|].",
            x=max(first, second) if more else min(first, second),
            word=word,
            y=min(first, second) if more else max(first, second),
        )
        return
    first, second = rng.randrange(1, 13), rng.randrange(1, 13)
    sign, result = rng.choice((("+", first + second), ("-", first + second), ("*", first * second)))
    if sign == "-":
        first, result = first + second, first
    spoken = {"+": "plus", "-": "minus", "*": "times"}[sign]
    talk.user(
        "What is {a} {sign} {b}?",
        "{a} {sign} {b}[ =|?]",
        "How much is {a} {spoken} {b}?",
        a=first,
        b=second,
        sign=sign,
        spoken=spoken,
    )
    talk.say("{r}.", "{a} {spoken} {b} is {r}.", a=first, b=second, spoken=spoken, r=result)


FACTS: tuple[Callable[[Talk], None], ...] = (name_and_place, number, shopping, passage, passage, repeat, compare)
