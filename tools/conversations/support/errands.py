"""Further errands of the examples' shop, which its policy asks for and the examples do not show.

Parcels that are lost, orders that are wrong or incomplete, wishes that no function can meet, and handing over.
"""

from __future__ import annotations

from datetime import timedelta

from examples_text.script import Script
from examples_text.shop import PRODUCTS, money
from examples_text.support_faults import Fault
from examples_text.support_orders import HUBS, SHOPS, Errand

from conversations.support.questions import QUESTIONS
from conversations.words import listed, say

CLOSINGS = ("Is there anything else?", "Anything else I can do for you?", "Can I help you with anything else?")


class Lost(Fault):
    """A parcel that was not scanned for seven days or more: a claim, and the order is sent again."""

    def prepare(self) -> None:
        self.product = self.world.take()
        self.silent = self.rng.randrange(7, 13)
        self.order = self.world.order("shipped", self.silent + 3, None, self.product)

    def openings(self) -> tuple[str, ...]:
        return (
            f"My {self.product.name} should have come more than a week ago. Where is it?",
            f"Nothing has moved on order {self.order.number} for days. Is it lost?",
            f"I think the carrier has lost order {self.order.number}. Could you check?",
        )

    def play(self, script: Script) -> None:
        order, world = self.order, self.world
        last = world.today - timedelta(days=self.silent)
        place = self.rng.choice(HUBS)
        event = {"at": f"{last}T{self.rng.randrange(6, 22):02d}:15", "place": place, "event": "Arrived at the depot"}
        parcel = {
            "carrier": order.carrier,
            "tracking": order.tracking,
            "status": "in transit",
            "expected": None,
            "events": [event],
        }
        self.fetch(script, f"Thank you, {world.first}. Let me look at the order and the parcel.")
        script.call(None, ("track_parcel", {"tracking": order.tracking}, parcel))
        script.say(
            f"The last scan was at {place} on {last}, {self.silent} days ago, so the parcel counts as lost. I would "
            f"open a claim, and order {order.number} is sent again today, at no cost to you. Shall I?"
        )
        self.agree(script, "Yes, I still need it.", "That would be great.")
        number = f"CL-{self.rng.randrange(10000, 99999)}"
        wanted = {"order": order.number, "kind": "lost", "description": f"No scan since {last}", "wish": "replacement"}
        script.call(None, ("create_claim", wanted, {"claim": number, "accepted": True, "started": "replacement"}))
        script.say(f"Claim {number} is open and your order is sent again today. {self.rng.choice(CLOSINGS)}")


class Incomplete(Fault):
    """Something is missing from the parcel, or something else is in it."""

    def prepare(self) -> None:
        self.product = self.world.take()
        self.wrong = self.rng.random() < 0.5
        self.days = self.rng.choice((1, 2, 4, 9))
        self.order = self.world.order("delivered", self.days + 4, self.days, self.product)
        self.instead = self.rng.choice([p.name for p in PRODUCTS if p is not self.product])
        self.wish = self.rng.choice(("replacement", "refund"))

    def openings(self) -> tuple[str, ...]:
        number, name = self.order.number, self.product.name
        if self.wrong:
            return (
                f"You sent me the {self.instead}, but I ordered the {name}.",
                f"There's a mistake in order {number}: I got the {self.instead} instead of the {name}.",
            )
        return (
            f"The {name} is missing from my parcel.",
            f"I opened the parcel of order {number} and the {name} isn't in it.",
        )

    def play(self, script: Script) -> None:
        photo, name = self.photo(), self.product.name
        self.fetch(script, f"I'm sorry about that, {self.world.first}. Let me see the order.")
        script.say(
            f"The {name} is on order {self.order.number}, which came on {self.order.delivered}. Could you upload a "
            "photo of what was in the parcel? And would you like a replacement or your money back?"
        )
        script.user(
            say(self.rng, ("[Here it is|Photo attached] [{photo}]. A {wish}, please.",), photo=photo, wish=self.wish)
        )
        what = f"{money(self.product.cents)} are refunded" if self.wish == "refund" else "it is sent today"
        script.say(f"Thank you. I would open a claim for the {name}: {what}, at no cost to you. Shall I do that?")
        self.agree(script, "Yes, thanks.")
        kind = "wrong_item" if self.wrong else "missing"
        said = f"{self.instead} instead of {name}" if self.wrong else f"{name} was not in the parcel"
        wanted = {"kind": kind, "description": said, "photo": photo, "wish": self.wish}
        number = self.claim(script, wanted, {"accepted": True, "started": self.wish})
        script.say(f"Claim {number} is accepted and the {self.wish} has been started. {self.rng.choice(CLOSINGS)}")


class OneLine(Errand):
    """A single line cannot be cancelled; the customer keeps the order or cancels the whole of it."""

    def prepare(self) -> None:
        self.product = self.world.take()
        self.order = self.world.order("processing", 1, None, self.product)
        self.whole = self.rng.random() < 0.4

    def openings(self) -> tuple[str, ...]:
        return (
            f"Can you take the {self.product.name} out of order {self.order.number}? I want to keep the rest.",
            f"Please cancel only the {self.product.name}, not the whole order {self.order.number}.",
        )

    def play(self, script: Script) -> None:
        number, total = self.order.number, money(self.order.total_cents)
        self.fetch(script)
        script.say(
            f"I'm sorry, {self.world.first}: single lines cannot be cancelled. I can cancel order {number} as a whole "
            f"and refund {total}, or you keep it and send the {self.product.name} back later, free of charge. Which "
            "would you like?"
        )
        if not self.whole:
            script.user(self.rng.choice(("Then I'll keep it and send that back.", "Leave it as it is, then.")))
            script.say(
                f"All right, order {number} stays as it is. Once it is there, write to us and we open a return for "
                f"the {self.product.name}. {self.rng.choice(CLOSINGS)}"
            )
            return
        script.user(self.rng.choice(("Then cancel all of it.", "OK, cancel the whole order please.")))
        answer = {"order": number, "status": "cancelled", "refund_cents": self.order.total_cents}
        script.call(None, ("cancel_order", {"order": number}, answer))
        script.say(f"Order {number} is cancelled, and {total} are on their way back. {self.rng.choice(CLOSINGS)}")


class OnItsWay(Errand):
    """A new address for a parcel that has left already: another day or a pickup point instead."""

    def prepare(self) -> None:
        self.product = self.world.take()
        self.order = self.world.order("shipped", 3, None, self.product)
        self.day = (self.world.today + timedelta(days=self.rng.randrange(3, 8))).isoformat()
        self.shop = self.rng.choice(SHOPS)

    def openings(self) -> tuple[str, ...]:
        return (
            f"Please send order {self.order.number} to my new address instead.",
            f"I'm away when the {self.product.name} comes. Can you change the address?",
        )

    def play(self, script: Script) -> None:
        order = self.order
        self.fetch(script, "One moment, I'll check how far the order is.")
        script.say(
            f"Order {order.number} left on {order.shipped}, {self.world.first}, so the address can't be changed any "
            f"more. I can ask {order.carrier} to bring it on another day or to keep it at a pickup point, once. Which "
            "would help you?"
        )
        if self.rng.random() < 0.5:
            script.user(
                say(self.rng, ("[Another day, please|Could they come] on {day}.", "{day} would be good."), day=self.day)
            )
            wanted, what = {"day": self.day}, f"bring it on {self.day}"
        else:
            script.user(f"Please keep it at {self.shop}.")
            wanted, what = {"pickup_point": self.shop}, f"keep it at {self.shop}"
        script.say(f"I would ask {order.carrier} to {what}. It could not be moved again after that. Shall I?")
        self.agree(script)
        until = (self.world.today + timedelta(days=9)).isoformat()
        result = {"ok": True} if "day" in wanted else {"ok": True, "keep_until": until}
        script.call(None, ("hold_parcel", {"tracking": order.tracking, **wanted}, result))
        script.say(f"Done: {order.carrier} will {what}. {self.rng.choice(CLOSINGS)}")


class Declined(Errand):
    """The customer thinks again when the refund is named, so that nothing is changed."""

    def prepare(self) -> None:
        self.product = self.world.take()
        self.order = self.world.order("processing", 1, None, self.product)

    def openings(self) -> tuple[str, ...]:
        return (f"I'd like to cancel order {self.order.number}.", f"Cancel the {self.product.name} for me, please.")

    def play(self, script: Script) -> None:
        number, total = self.order.number, money(self.order.total_cents)
        self.fetch(script)
        lines = ", ".join(f"{line.product.name} ({line.option})" for line in self.order.lines)
        script.say(
            f"I can cancel order {number} as a whole, it is still being processed. It contains: {lines}. You "
            f"would get {total} back to the payment method you used. Is that what you want?"
        )
        script.user(
            say(self.rng, ("[Oh|Hm], [wait|no], [I want to keep it|leave it] then.", "No, I've changed my mind."))
        )
        script.say(f"No problem, {self.world.first}. Order {number} stays as it is. {self.rng.choice(CLOSINGS)}")


class HandOver(Errand):
    """A person is asked for twice, a lawyer is named, or somebody was hurt: a colleague takes over."""

    def prepare(self) -> None:
        self.product = self.world.take(kinds=("ST", "PL", "TN", "SH", "LT"))
        self.order = self.world.order("delivered", 20, 16, self.product)
        self.kind = self.rng.choice(("person", "lawyer", "injury"))

    def openings(self) -> tuple[str, ...]:
        name = self.product.name
        if self.kind == "injury":
            return (f"The {name} broke and I hurt my hand.", f"I got burnt because the {name} failed. This is serious.")
        if self.kind == "lawyer":
            return (f"The {name} is rubbish. Give me my money back today or you'll hear from my lawyer.",)
        return (f"I want to talk to a person about my {name}.", f"Is there a human here? It's about the {name}.")

    def play(self, script: Script) -> None:
        first, name, number = self.world.first, self.product.name, self.order.number
        if self.kind == "person":
            script.say(f"I can do most things myself, {first}, and right away. What is it about the {name}?")
            script.user(self.rng.choice(("No, I want a person, please.", "I'd really rather talk to somebody.")))
        self.fetch(script)
        about = {
            "person": "asks for a person, twice",
            "lawyer": "wants the money back and names a lawyer",
            "injury": "reports an injury",
        }[self.kind]
        summary = f"{first} {self.world.last} {about}. Order {number}, {name}, delivered {self.order.delivered}."
        script.call(None, ("transfer", {"summary": summary}, {"ok": True, "waiting_minutes": self.rng.randrange(1, 9)}))
        sorry = "I'm very sorry that you were hurt. " if self.kind == "injury" else ""
        script.say(
            f"{sorry}A colleague takes over now, {first}, and knows about order {number}. Please stay in the chat."
        )


class Bought(Errand):
    """What an order contained, what it cost, or when it came."""

    def prepare(self) -> None:
        self.product = self.world.take()
        days = self.rng.randrange(5, 60)
        self.order = self.world.order("delivered", days + 4, days, self.product)
        self.asks = self.rng.choice(("lines", "total", "day"))

    def openings(self) -> tuple[str, ...]:
        number = self.order.number
        return {
            "lines": (f"What was in order {number} again?", f"Which things did I buy with order {number}?"),
            "total": (f"How much was order {number}?", f"What did I pay for order {number} in the end?"),
            "day": (f"When did order {number} come?", f"On which day was order {number} delivered?"),
        }[self.asks]

    def play(self, script: Script) -> None:
        order = self.order
        self.fetch(script)
        lines = [f"{line.product.name} ({line.option})" for line in order.lines]
        answer = {
            "lines": f"Order {order.number} had {listed(lines)} in it.",
            "total": f"Order {order.number} was {money(order.total_cents)}, shipping included.",
            "day": f"Order {order.number} was delivered on {order.delivered}.",
        }[self.asks]
        script.say(f"{answer} {self.rng.choice(CLOSINGS)}")


ERRANDS: tuple[type[Errand], ...] = (Lost, Incomplete, OneLine, OnItsWay, Declined, HandOver, Bought, *QUESTIONS)
