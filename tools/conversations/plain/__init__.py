"""Short exchanges without functions: greetings, what was said before, and what a very small model cannot know.

They are there so that a newcomer who types a question of his own gets a sentence. Must not know: any domain.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from examples_text.script import Script

from conversations import words
from conversations.plain.facts import name_and_place, number, shopping
from conversations.plain.reading import compare, passage, repeat
from conversations.plain.small_talk import about, ask, greet, look_up, pleasantry, wish
from conversations.toolset import Talk, Toolset
from conversations.words import say

SYSTEMS = (
    "You are [a helpful|a friendly|a kind|a careful|an] assistant.",
    "You are a [helpful|friendly] assistant. [Answer briefly.|Be brief.|Keep your answers short.|Be concise and "
    "polite.]",
    "[Answer|Reply] in one [short |]sentence.",
    "You answer questions [briefly|in plain words|honestly|in a friendly way].",
    "You are {name}, a [chat|helpful|digital] assistant.",
    "You are [an AI assistant|a language model|a chatbot]. [Be honest about what you do not know.|Do not make things "
    "up.|]",
    "You are a [helpful|polite] assistant for the [guests|customers|members|readers] of {place}.",
)
HOUSES = ("Library", "Hotel", "Museum", "Sports Club", "Bakery", "School", "Town Hall")
RULES = (
    "Answer in one short sentence.",
    "Never promise what you cannot keep.",
    "Be [polite|friendly|kind|patient].",
    "Be brief.",
    "Say so when you do not know something.",
    "Do not make things up.",
    "Use plain words.",
    "Answer in English.",
    "Use [no lists|no headings|plain sentences].",
    "Ask if something is not clear.",
    "Stay on the subject.",
    "Write numbers as [digits|they are].",
    "Do not repeat the question.",
    "Never guess a number.",
)
MOST_REPEATS = 24  # a policy that fills a prompt says the same again and again
KINDS: tuple[tuple[Callable[[Talk], None], int], ...] = (
    (greet, 3),
    (about, 2),
    (ask, 4),
    (wish, 2),
    (look_up, 2),
    (pleasantry, 2),
    (name_and_place, 2),
    (number, 2),
    (shopping, 2),
    (passage, 4),
    (repeat, 2),
    (compare, 2),
)


def conversation(rng: Random, name: str) -> Script:
    """One to five exchanges, with a system message or without."""
    place = f"{words.town(rng)} {rng.choice(HOUSES)}"
    script = Script(name, say(rng, SYSTEMS, name=words.given_name(rng), place=place), [])
    if rng.random() < 0.35:
        script.messages.clear()
    elif rng.random() < 0.4:
        rules = say(rng, (" ".join(rng.sample(RULES, rng.randrange(1, 7))),))
        own = rng.choice((f"{script.messages[0]['content']} ", ""))
        times = rng.choice((1, 1, 1, 2, rng.randrange(1, MOST_REPEATS)))
        script.messages[0]["content"] = own + " ".join([rules] * times) + rng.choice(("", " "))
    talk = Talk(rng, script, Toolset(rng, {}))
    kinds, weights = zip(*KINDS, strict=True)
    if rng.random() < 0.3:
        greet(talk)
    for kind in rng.choices(kinds, weights, k=rng.choice((1, 1, 2, 2, 3, 4))):
        if len(script.messages) < 12:
            kind(talk)
    return script
