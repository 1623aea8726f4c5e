"""Short exchanges in which the user gives a text, a sum or words to repeat. Must not know: functions."""

from __future__ import annotations

from conversations import words
from conversations.plain.things import ANIMALS, COLOURS, COUNTED, JOBS, PLACES, THINGS, a
from conversations.toolset import Talk


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
