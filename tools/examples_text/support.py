"""Support conversations: one policy and one set of tools; a customer with one to three errands each."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from examples_text import support_faults, support_goods, support_orders
from examples_text.script import MAX_MESSAGES, Script
from examples_text.shop import World
from examples_text.support_orders import Errand
from examples_text.support_tools import POLICY, TOOLS

CONVERSATIONS = 20
ERRANDS = (*support_orders.ERRANDS, *support_goods.ERRANDS, *support_faults.ERRANDS)
MOST_ERRANDS = 3
GREETINGS = (
    "Hello, and thanks for writing to Fernhollow. I'll gladly look into that. Which e-mail address is your "
    "account under?",
    "Hi! I can help with that. Could you give me the e-mail address of your account, please?",
    "Welcome to Fernhollow. To find you I need your e-mail address, or an order number and the postcode.",
)
LINKS = ("Thanks! One more thing. ", "Great. While I'm here: ", "Super, thank you. And another question. ")
GOODBYES = ("No, that's all. Thank you!", "That was all, have a nice day.", "No. Thanks for your help!")


def identify(script: Script, world: World, slip: bool) -> None:
    """Ask who it is, and find the account; with a slip, the customer mistypes the address first."""
    script.say(world.rng.choice(GREETINGS))
    if slip:
        wrong = world.email.replace(".", "", 1)
        script.user(wrong)
        script.call(None, ("find_customer", {"email": wrong}, {"error": "no customer has this address"}))
        script.say(f"I can't find an account for {wrong}. Could there be a typing mistake in it?")
        script.user(f"Sorry, my mistake, there's a dot missing: {world.email}")
    else:
        script.user(world.rng.choice((world.email, f"It's {world.email}", f"{world.email}, thanks")))
    script.call(None, ("find_customer", {"email": world.email}, world.profile()))


def add_errand(script: Script, opening: str, errand: Errand) -> None:
    """Play a further errand, if the conversation stays short enough."""
    trial = script.fork(script.name)
    trial.user(opening)
    errand.play(trial)
    if len(trial.messages) <= MAX_MESSAGES:
        script.messages = trial.messages


def conversation(index: int) -> Script:
    """One conversation; one in three has a single errand, one in four ends with something to be answered."""
    name = f"support-{index + 1:02d}"
    rng = Random(name)
    world = World(rng)
    kinds = [ERRANDS[index % len(ERRANDS)]]
    kinds += rng.sample([kind for kind in ERRANDS if kind is not kinds[0]], MOST_ERRANDS - 1)
    first, *rest = [kind(world) for kind in kinds]
    script = Script(name, POLICY, TOOLS)
    script.user(first.opening)
    identify(script, world, slip=index % 5 == 1)
    first.play(script)
    for errand in rest if index % 3 else ():
        add_errand(script, rng.choice(LINKS) + errand.opening, errand)
    if index % 4 == 3:
        script.drop_answer()
    elif len(script.messages) <= MAX_MESSAGES - 2:
        script.user(rng.choice(GOODBYES))
        script.say(f"You're welcome, {world.first}. Take care!")
    return script


def conversations() -> Iterator[Script]:
    """All support conversations."""
    for index in range(CONVERSATIONS):
        yield conversation(index)
