"""Short exchanges about what the user has said of himself or keeps in mind: names, numbers, lists.

Must not know: functions; there are none in these talks.
"""

from __future__ import annotations

from conversations import words
from conversations.plain.things import JOBS, THINGS, a
from conversations.toolset import Talk
from conversations.words import listed

ORDINALS = ("first", "second", "third", "fourth", "fifth")
NOTED = (
    "[OK|All right|Good|Got it], I'll remember that.",
    "[Noted|Understood|Got it].",
    "[Thanks|Thank you], I've got it.",
)


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
