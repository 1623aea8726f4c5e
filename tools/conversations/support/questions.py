"""Errands of the examples' shop that the policy answers by itself, and questions about what is in stock."""

from __future__ import annotations

from examples_text.script import Script
from examples_text.shop import money
from examples_text.support_orders import Errand

from conversations.words import say

CLOSINGS = ("Is there anything else?", "Anything else?", "Can I help you with anything else?")
# What is asked, and what the policy says to it.
RULES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("How much is shipping?", "What do you charge for delivery?", "Is shipping free?"),
        "Shipping costs €5.90 and is free from €75.00. It takes two to four working days.",
    ),
    (
        ("How long does a parcel take?", "How fast do you deliver?"),
        "A parcel takes two to four working days.",
    ),
    (
        (
            "I've seen it cheaper in another shop. Do you match that?",
            "Another shop sells the same for less. Can you match it?",
        ),
        "I'm sorry, we don't match the prices of other shops. If our own price falls within 14 days of your order, we "
        "refund the difference.",
    ),
    (
        ("I forgot my voucher. Can you still add it to my order?", "Can I use a voucher for what I ordered last week?"),
        "I'm sorry, a voucher can't be added to an order afterwards. You can use it for the next one.",
    ),
    (
        ("Could you pay my points out in cash?", "Can I have money for my loyalty points?"),
        "Points can't be paid out. 100 points are worth €5.00 of shop credit, in whole hundreds.",
    ),
    (
        ("How do I become a Ridge member?", "How many points do I need for the Ridge tier?"),
        "You belong to the Ridge tier from 400 points in a year. There is one point for every euro that you spend.",
    ),
    (
        ("Can I return a sleeping mat that I've used?", "My steel bottle has been used twice. Can it go back?"),
        "I'm sorry, sleeping mats and bottles that have been used are not taken back, unless they are faulty.",
    ),
    (
        ("What does a repair cost after the warranty?", "How much is a new zip when the warranty is over?"),
        "Outside of the warranty a repair is 15 euros for a zip or a buckle, 25 for a pole and 35 for seams, to be "
        "paid after the work.",
    ),
    (
        ("What does the warranty cover?", "Is a broken zip covered by the warranty?"),
        "The warranty covers seams, zips, buckles, poles and electronics, but not wear, tears, burns or the loss of "
        "waterproofing after washing.",
    ),
    (
        ("Do I have to pay for the return label?", "What does it cost to send something back?"),
        "The label for a return is free.",
    ),
)
PRIVATE = (
    "Which address do you have for me?",
    "Can you read me the address that is in my account?",
    "What is the payment method on my account?",
)


class Rule(Errand):
    """A question that the policy answers."""

    def prepare(self) -> None:
        self.questions, self.answer = self.rng.choice(RULES)

    def openings(self) -> tuple[str, ...]:
        return self.questions

    def play(self, script: Script) -> None:
        script.say(f"{self.answer} {self.rng.choice(CLOSINGS)}")


class TimeLeft(Errand):
    """How long the customer has to send things back, which depends on the tier."""

    def openings(self) -> tuple[str, ...]:
        return ("How long can I send things back?", "How many days do I have for a return?")

    def play(self, script: Script) -> None:
        tier = self.world.tier
        days = 60 if tier == "Ridge" else 30
        script.say(
            f"You are in the {tier} tier, {self.world.first}, so you have {days} days from the delivery, if it is "
            f"unused and complete. {self.rng.choice(CLOSINGS)}"
        )


class Private(Errand):
    """What may not be read out."""

    def openings(self) -> tuple[str, ...]:
        return PRIVATE

    def play(self, script: Script) -> None:
        script.say(
            f"I'm sorry, {self.world.first}, I can't read that out here, for your own safety. You find it in your "
            f"account. {self.rng.choice(CLOSINGS)}"
        )


class InStock(Errand):
    """Whether a product is there in a size or colour, and what it costs."""

    def prepare(self) -> None:
        self.product = self.world.take(minimum_options=2)
        self.option = self.rng.choice(self.product.options)
        self.gone = self.rng.random() < 0.35

    def openings(self) -> tuple[str, ...]:
        name = self.product.name
        return (
            f"Do you have the {name} in {self.option}?",
            f"Is the {name} in {self.option} in stock, and what does it cost?",
        )

    def play(self, script: Script) -> None:
        product, name = self.product, self.product.name
        page = self.world.page(product, product.cents)
        if self.gone:
            page["stock"][self.option] = 0
        row = {"sku": product.sku, "name": name, "price_cents": product.cents, "description": product.note}
        script.call(None, ("search_products", {"query": name}, {"count": 1, "results": [row]}))
        script.call(None, ("get_product", {"sku": product.sku}, page))
        price = money(product.cents)
        if self.gone:
            others = [option for option in product.options if option != self.option]
            script.say(
                f"The {name} is sold out in {self.option} at the moment. There is still {', '.join(others)}, for "
                f"{price}. {self.rng.choice(CLOSINGS)}"
            )
            return
        count = page["stock"][self.option]
        script.say(
            say(
                self.rng,
                (
                    "Yes, {count} of the {name} in {option} are in stock, for {price} each. ",
                    "Yes: {option} is in stock, {count} pieces. The {name} costs {price}. ",
                ),
                count=count,
                name=name,
                option=self.option,
                price=price,
            )
            + self.rng.choice(CLOSINGS)
        )


QUESTIONS: tuple[type[Errand], ...] = (Rule, Rule, TimeLeft, Private, InStock)
