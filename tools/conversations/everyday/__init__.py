"""Everyday functions, a few at a time: the weather, a timer, a message, a light; what most people try first.

Some requests leave something out, some want two things at once, some fail, and for some there is no function.
Must not know: what other domains do.
"""

from __future__ import annotations

from random import Random

from examples_text.script import Script

from conversations import words
from conversations.everyday.deed import Deed
from conversations.everyday.home import HOME
from conversations.everyday.knowledge import KNOWLEDGE
from conversations.plain.small_talk import about, ask, greet, pleasantry
from conversations.toolset import Talk, Toolset
from conversations.words import say

DEEDS = (*HOME, *KNOWLEDGE)
GREETED = 0.08  # of the conversations begin with hello alone
MAX_MESSAGES = 18
SYSTEMS = (
    "You are [a helpful|a friendly|an|a personal|a voice] assistant.",
    "You are [a helpful|a friendly] assistant. [Use the functions|Use the tools|Call a function] [when they help|if "
    "you need to|whenever you can].",
    "You are {name}, [a|the] [home|personal|digital] assistant[| of {other}]. [Answer briefly.|Be brief.|Keep it "
    "short.|]",
    "[Answer|Help the user] with the [functions|tools] below. [If something is missing, ask.|Do not guess.|Ask if you "
    "are not sure.]",
    "You help {other} [at home|on the road|with small things|every day].",
)
ERRORS = ("timeout", "not available", "service is down", "not found", "try again later")
FAILURES = (
    "I'm sorry, that did not work: {error}.",
    "That failed, I'm sorry ({error}). Please try again later.",
    "I can't do it at the moment: {error}.",
)
THANKS = (("[Thanks|Thank you|Thanks a lot][!|.]",), ("You're welcome[!|.]", "[Gladly|My pleasure][!|.]"))
NO_FUNCTION = (
    "I'm sorry, I can't do that: I have no function for it.",
    "I have no function for that, I'm sorry.",
    "I'm sorry, that is not something I can do here.",
)


def single(talk: Talk, key: str, deed: Deed) -> None:
    """One request, which may be vague at first, and its call, which may fail."""
    fields = deed.draw(talk.rng)
    if deed.key and talk.chance(0.15):
        talk.user(deed.vague)
        talk.say(deed.question)
        value = str(fields[deed.key])
        talk.user("{value}[|.|, please.]", value=value)
    else:
        talk.user(*deed.asks, **fields)
    if talk.chance(0.07):
        error = talk.rng.choice(ERRORS)
        talk.call(key, {"error": error}, **deed.arguments(fields))
        talk.say(*FAILURES, error=error)
        return
    talk.call(key, deed.returned(fields), **deed.arguments(fields))
    talk.say(*deed.answers, **fields)


def double(talk: Talk, key: str, deed: Deed) -> None:
    """Two requests in one message, two calls at once, one answer."""
    both = [deed.draw(talk.rng) for _ in range(2)]
    first, second = (say(talk.rng, deed.asks, **fields) for fields in both)
    talk.user("{first} [And|Then]: {second}", "{first} {second}", first=first, second=second)
    talk.script.call(None, *(talk.toolset.call(key, deed.returned(f), **deed.arguments(f)) for f in both))
    talk.say(
        "{first} {second}", first=say(talk.rng, deed.answers, **both[0]), second=say(talk.rng, deed.answers, **both[1])
    )


def impossible(talk: Talk, others: list[Deed]) -> None:
    """A request for a function that is not there."""
    deed = talk.rng.choice(others)
    talk.user(*deed.asks, **deed.draw(talk.rng))
    talk.say(*NO_FUNCTION)


def conversation(rng: Random, name: str) -> Script:
    """One to four requests to an assistant with one to six functions."""
    chosen = rng.sample(DEEDS, rng.choice((1, 1, 2, 3, 4, 6)))
    keys = {str(index): deed for index, deed in enumerate(chosen)}
    toolset = Toolset(rng, {key: deed.function for key, deed in keys.items()})
    system = say(rng, SYSTEMS, name=words.given_name(rng), other=words.given_name(rng))
    script = Script(name, system.strip(), toolset.tools)
    if rng.random() < 0.2:
        script.messages.clear()
    talk = Talk(rng, script, toolset)
    others = [deed for deed in DEEDS if deed not in chosen]
    if rng.random() < GREETED:
        greet(talk)
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        if len(script.messages) > MAX_MESSAGES - 7:
            break
        kind = rng.random()
        key = rng.choice(list(keys))
        if kind < 0.08:
            impossible(talk, others)
        elif kind < 0.16:
            rng.choice((about, ask, pleasantry))(talk)
        elif kind < 0.3:
            double(talk, key, keys[key])
        else:
            single(talk, key, keys[key])
    if rng.random() < 0.25:
        talk.user(*THANKS[0])
        talk.say(*THANKS[1])
    return script
