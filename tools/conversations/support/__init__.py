"""Support conversations of the examples' shop: its policy, its tools, its errands; other customers and orders.

The examples are held-out draws of this kind: the same makers, other seeds, and a few names where there are many here.
Must not know: how a conversation becomes tokens.
"""

from __future__ import annotations

from random import Random

from examples_text import support as examples
from examples_text.script import MAX_MESSAGES, Script
from examples_text.shop import World
from examples_text.support_orders import Errand
from examples_text.support_tools import POLICY, TOOLS

from conversations import words
from conversations.support.errands import ERRANDS as MORE_ERRANDS
from conversations.support.errands import HandOver
from conversations.words import say

NEW_NAMES = 0.75  # of the customers; the others have names as in the examples, in other pairs
GREETINGS = (
    "[Hello|Hi|Good morning], and thanks for writing. [I'll gladly look into that|I can help with that]. Which e-mail "
    "address is your account under?",
    "[Of course|Sure], I'll help you with that. [May I have|Could you give me] the e-mail address of your account?",
    "[Gladly|With pleasure]. To find your account I need its e-mail address, or an order number and the postcode.",
)
TELLS = (
    "{email}",
    "It's {email}",
    "{email}, thanks",
    "[My address is|You'll find me under|The account is] {email}[.|]",
    "[Sure|Of course|OK]: {email}",
    "{email} [should be it|is the one I use|I think].",
)
ASKS_AGAIN = (
    "I can't find an account for {wrong}. Could there be a typing mistake in it?",
    "There is no account under {wrong}. Would you check the spelling for me?",
)
CORRECTS = (
    "Sorry, my mistake, there's a dot missing: {email}",
    "[Oh|Oops|Ah], [I mistyped it|that was a typo]. It's {email}",
    "{email}, [sorry|with the dot this time].",
)
NUMBER_TELLS = (
    "[I don't know which address I used|No idea which address it was], but the order is {order} and the postcode is "
    "{postcode}.",
    "Order {order}, postcode {postcode}.",
    "[The number is|It's order] {order}, and I live in {postcode}.",
)
LINKS = (
    "Thanks! One more thing. ",
    "Great. While I'm here: ",
    "Super, thank you. And another question. ",
    "[Thank you|Thanks|Good]. [Next|And|Also]: ",
    "[Perfect|Wonderful|OK]. [There is something else|I have another question|Something else]. ",
    "",
)
GOODBYES = (
    "No, that's all. Thank you!",
    "That was all, have a nice day.",
    "No. Thanks for your help!",
    "[No|Nope], [thanks|thank you][, bye|. Bye!|!]",
    "That's everything[, thanks|. Have a good day].",
)
FAREWELLS = (
    "You're welcome, {first}. Take care!",
    "You're welcome, {first}. [Have a nice day|Enjoy your time outside|Take care]!",
    "[Gladly|My pleasure], {first}. [Goodbye|Take care|Have a good day]!",
)
CALLBACK = (
    "I'm sorry, I can't find {wrong} either. [I can offer you a callback|A colleague can call you back] who looks for "
    "the account with you. [Which number should we use|What is your phone number]?"
)


class Customer(World):
    """A World whose people and places are drawn from many more."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        if rng.random() < NEW_NAMES:
            self.first, self.last = words.given_name(rng), words.family_name(rng)
            self.email = words.email(rng, self.first, self.last)

    def new_address(self) -> dict[str, str]:
        """Somewhere to send a parcel."""
        return words.address(self.rng) if self.rng.random() < NEW_NAMES else super().new_address()


def identify(script: Script, world: World, errand: Errand) -> None:
    """Find the account: by address, by a second try at the address, or by the errand's order and the postcode."""
    rng = world.rng
    script.say(rng.choice(examples.GREETINGS) if rng.random() < 0.5 else say(rng, GREETINGS))
    way = rng.random()
    if way < 0.15 and hasattr(errand, "order"):
        order, code = errand.order.number, world.address["postcode"]
        script.user(say(rng, NUMBER_TELLS, order=order, postcode=code))
        script.call(None, ("find_customer", {"order": order, "postcode": code}, world.profile()))
        return
    if way < 0.35:
        wrong = world.email.replace(".", "", 1)
        script.user(wrong)
        script.call(None, ("find_customer", {"email": wrong}, {"error": "no customer has this address"}))
        script.say(say(rng, ASKS_AGAIN, wrong=wrong))
        script.user(say(rng, CORRECTS, email=world.email))
    else:
        script.user(say(rng, TELLS, email=world.email))
    script.call(None, ("find_customer", {"email": world.email}, world.profile()))


def nobody(script: Script, world: World) -> None:
    """Two tries, nobody found, a callback; nothing else is done."""
    rng = world.rng
    script.say(rng.choice(examples.GREETINGS))
    tries = [world.email.replace(".", "", 1), world.email]
    for number, wrong in enumerate(tries):
        script.user(wrong if number == 0 else say(rng, CORRECTS, email=wrong))
        script.call(None, ("find_customer", {"email": wrong}, {"error": "no customer has this address"}))
        if number == 0:
            script.say(say(rng, ASKS_AGAIN, wrong=wrong))
    script.say(say(rng, (CALLBACK,), wrong=tries[-1]))
    phone = words.code(rng, "0899 999999")
    script.user(f"{phone}, {rng.choice(('in the afternoon', 'any time', 'after six'))} please.")
    summary = f"No account found for {tries[0]} or {tries[1]}. Callback to {phone}."
    script.call(None, ("transfer", {"summary": summary}, {"ok": True, "answer_within": "one working day"}))
    script.say(f"Thank you. A colleague will call you on {phone} within one working day. I'm sorry for the trouble.")


def fits(errand: Errand, script: Script, opening: str) -> Script | None:
    """The script with a further errand, if it stays short enough."""
    trial = script.fork(script.name)
    trial.user(opening)
    errand.play(trial)
    return trial if len(trial.messages) <= MAX_MESSAGES else None


def conversation(rng: Random, name: str) -> Script:
    """One conversation with one to three errands; one in six ends with something to be answered."""
    world = Customer(rng)
    kinds = rng.sample(examples.ERRANDS, examples.MOST_ERRANDS)
    for index in range(len(kinds)):
        if rng.random() < 0.25:
            kinds[index] = rng.choice(MORE_ERRANDS)
    first, *rest = [kind(world) for kind in dict.fromkeys(kinds)]
    script = Script(name, POLICY, TOOLS)
    script.user(first.opening)
    if rng.random() < 0.02:
        nobody(script, world)
        return script
    identify(script, world, first)
    first.play(script)
    errands = [first]
    for errand in rest if rng.random() < 0.7 else ():
        longer = None if isinstance(errands[-1], HandOver) else fits(errand, script, say(rng, LINKS) + errand.opening)
        if longer:
            script.messages = longer.messages
            errands.append(errand)
    if isinstance(errands[-1], HandOver):
        return script
    if len(script.messages) <= MAX_MESSAGES - 2:
        script.user(say(rng, GOODBYES))
        script.say(say(rng, FAREWELLS, first=world.first))
    return script
