"""Errands of the support conversations about an order on its way: where it is, stopping it, moving it.

An errand is made from a World, which it gives the order it needs. It knows what the customer says first, and
plays the rest on a Script.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

from examples_text.script import Script
from examples_text.shop import Order, World, money

HUBS = ("Aldermoor hub", "Thornby depot", "Pennyford sorting centre", "Great Harrow hub", "Lindale depot")
SCANS = (
    "Handed over by the shop",
    "Sorted",
    "Left the depot",
    "Arrived at the depot",
    "Held back: lorry full",
    "Sorted again",
    "Left the depot",
)
SHOPS = ("Corner Books", "Miller's Bakery", "the petrol station at the roundabout", "Kite & Key")
REASONS = ("my trip has been called off", "I found my old one in the attic", "I ordered it twice")


class Errand(ABC):
    """One thing that a customer wants."""

    order: Order

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.prepare()
        self.opening = self.rng.choice(self.openings())

    def prepare(self) -> None:  # noqa: B027 (not every errand needs one)
        """Make the order and what else the errand needs."""

    @abstractmethod
    def openings(self) -> tuple[str, ...]:
        """What the customer may say first."""

    @abstractmethod
    def play(self, script: Script) -> None:
        """Everything after the opening, once the customer has been found."""

    def fetch(self, script: Script, remark: str | None = None) -> None:
        """Look the order up."""
        script.call(remark, ("get_order", {"order": self.order.number}, self.order.as_json()))

    def agree(self, script: Script, *answers: str) -> None:
        """The customer says yes."""
        script.user(self.rng.choice((*answers, "Yes please.", "Yes, go ahead.")))


class WhereIsIt(Errand):
    """A parcel that is on its way, and then a pickup point."""

    def prepare(self) -> None:
        self.product = self.world.take()
        self.late = self.rng.random() < 0.6
        self.order = self.world.order("shipped", 6 if self.late else 3, None, self.product)
        self.shop = self.rng.choice(SHOPS)

    def openings(self) -> tuple[str, ...]:
        name = self.product.name
        return (
            f"Hi, I'm still waiting for my {name}. Can you tell me where the parcel is?",
            f"Hello! Order {self.order.number} was meant to be here by now and it isn't. Where has it got "
            "to?",
            f"Where is my parcel? It has my {name} in it and I need it for the weekend.",
        )

    def tracking(self) -> dict[str, Any]:
        """What the carrier says about the parcel, newest first."""
        assert self.order.shipped is not None
        events = []
        for index, text in enumerate(SCANS if self.late else SCANS[:4]):
            day = self.order.shipped + timedelta(days=index // 2)
            hour = 5 + 12 * (index % 2) + self.rng.randrange(5)
            time = f"{day.isoformat()}T{hour:02d}:{self.rng.randrange(60):02d}"
            events.append({"at": time, "place": self.rng.choice(HUBS), "event": text})
        expected = self.world.today + timedelta(days=2 if self.late else 1)
        return {
            "carrier": self.order.carrier,
            "tracking": self.order.tracking,
            "status": "delayed" if self.late else "in transit",
            "expected": expected.isoformat(),
            "events": events[::-1],
        }

    def play(self, script: Script) -> None:
        order, parcel = self.order, self.tracking()
        self.fetch(script, f"Thank you, {self.world.first}. Let me look at the order and the parcel.")
        script.call(None, ("track_parcel", {"tracking": order.tracking}, parcel))
        last = parcel["events"][0]
        delay = "It was held back for a day because the lorry was full. " if self.late else ""
        script.say(
            f"Your order {order.number} was sent on {order.shipped} with {order.carrier}. {delay}The last "
            f"scan was at {last['place']} on {last['at'][:10]} at {last['at'][11:]}, "
            f"\"{last['event'].lower()}\", and the carrier expects to deliver it on {parcel['expected']}."
        )
        script.user(f"I won't be home that day. Is there a way to have it kept at {self.shop}?")
        script.say(
            f"Yes, that can be done once for each parcel. I would ask {order.carrier} to keep it at "
            f"{self.shop}, where you can pick it up with the tracking number. It could not be moved again "
            "after that. Shall I?"
        )
        self.agree(script, "Perfect, do that.")
        until = (self.world.today + timedelta(days=9)).isoformat()
        place = {"tracking": order.tracking, "pickup_point": self.shop}
        script.call(None, ("hold_parcel", place, {"ok": True, "keep_until": until}))
        script.say(
            f"Done: {order.carrier} will bring it to {self.shop} and keep it there until {until}. Please "
            f"take the tracking number {order.tracking} with you. Is there anything else I can do?"
        )


class Cancel(Errand):
    """An order to be cancelled, which may be packed already."""

    def prepare(self) -> None:
        self.product = self.world.take()
        self.packed = self.rng.random() < 0.4
        self.order = self.world.order("packed" if self.packed else "processing", 1, None, self.product)
        self.reason = self.rng.choice(REASONS)

    def openings(self) -> tuple[str, ...]:
        return (
            f"Good morning, I'd like to cancel the order with the {self.product.name}, {self.reason}.",
            f"Please cancel order {self.order.number}. It turns out that {self.reason}.",
        )

    def play(self, script: Script) -> None:
        self.fetch(script)
        total = money(self.order.total_cents)
        if self.packed:
            self.play_packed(script, total)
            return
        number = self.order.number
        lines = ", ".join(f"{line.product.name} ({line.option})" for line in self.order.lines)
        script.say(
            f"I can cancel order {number} as a whole, it is still being processed. It contains: {lines}. You "
            f"would get {total} back to the payment method you used. Is that what you want?"
        )
        self.agree(script, "Yes, all of it.", "That's right, yes.")
        answer = {"order": number, "status": "cancelled", "refund_cents": self.order.total_cents}
        script.call(None, ("cancel_order", {"order": number}, answer))
        script.say(
            f"Order {number} is cancelled, and {total} are on their way back to you; banks take up to five "
            "working days. Can I help you with anything else?"
        )

    def play_packed(self, script: Script, total: str) -> None:
        """It is too late to cancel."""
        script.say(
            f"I'm sorry, {self.world.first}: order {self.order.number} has been packed and cannot be "
            "stopped any more. You can refuse the parcel at the door, or keep it closed and send it back "
            f"with our label. Both are free, and the {total} go back to the payment method you used once "
            "it is here."
        )
        script.user("Hm, all right. If I refuse it, do I have to do anything else?")
        script.say(
            "No. Just tell the driver that you don't accept it. When it arrives here we recognise it by its "
            f"number, and the refund of {total} follows within five working days. Anything else?"
        )


class MoveHouse(Errand):
    """A new address for an order that has not been packed."""

    def prepare(self) -> None:
        self.product = self.world.take()
        self.order = self.world.order("processing", 1, None, self.product)
        self.new = self.world.new_address()
        self.said = f"{self.new['street']}, {self.new['town']}, {self.new['postcode']}"

    def openings(self) -> tuple[str, ...]:
        return (
            f"I moved last week and order {self.order.number} is going to the old flat. Can you change that?",
            f"Oh no, I just noticed that the {self.product.name} I ordered will go to my old address!",
        )

    def play(self, script: Script) -> None:
        number = self.order.number
        self.fetch(script, "One moment, I'll check how far the order is.")
        script.say(
            f"Good news, {self.world.first}: order {number} has not been packed yet, so the address can "
            "still be changed. Where should it go?"
        )
        script.user(
            self.rng.choice((f"To {self.said}.", f"{self.said} please, with the neighbour if I'm out."))
        )
        script.say(
            f"I would send order {number} to {self.said}. I can't leave a note for the driver, but the "
            "carrier writes to you on the day and lets you choose a neighbour. Shall I change the address?"
        )
        self.agree(script, "Yes, thank you.")
        changed = {"order": number, "ship_to": self.new}
        script.call(None, ("update_address", {"order": number, **self.new}, changed))
        script.say(
            f"It's changed: the order goes to {self.said} now. Your account still has the old one, though."
        )
        script.user("Can you change that as well?")
        script.say(
            "That is something only you can change, for your own safety: in your account, under "
            "Addresses. The order itself is fine either way. Is there anything else?"
        )


class PriceDrop(Errand):
    """Something became cheaper after it was ordered; sometimes too long ago."""

    def prepare(self) -> None:
        self.product = self.world.take()
        self.days = self.rng.choice((5, 9, 12, 19))
        self.order = self.world.order("delivered", self.days, self.days - 4, self.product)
        self.lower = self.product.cents - self.rng.choice((500, 1000, 1500, 2000))

    def openings(self) -> tuple[str, ...]:
        name, paid, now = self.product.name, money(self.product.cents), money(self.lower)
        return (
            f"I bought the {name} from you and now it's cheaper on your site. Do I get the difference back?",
            f"{now} for the {name} today, and I paid {paid} the other day! Can you do something about that?",
        )

    def play(self, script: Script) -> None:
        script.call(
            f"I understand, {self.world.first}. I'll compare your order with today's price.",
            ("get_order", {"order": self.order.number}, self.order.as_json()),
            ("get_product", {"sku": self.product.sku}, self.world.page(self.product, self.lower)),
        )
        if self.days > 14:
            self.play_late(script)
            return
        cents, number = self.product.cents - self.lower, self.order.number
        script.say(
            f"You're right: you paid {money(self.product.cents)}, the price is {money(self.lower)} now, it "
            f"is in stock, and the order is {self.days} days old. I would refund {money(cents)} to the "
            f"payment method of order {number}. That works once for an order. Shall I?"
        )
        self.agree(script, "Yes, that would be great.")
        wanted = {"order": number, "cents": cents, "reason": f"Price of {self.product.sku} fell"}
        answer = {"refund": f"R-{self.rng.randrange(10**5, 10**6)}", "cents": cents}
        script.call(None, ("issue_refund", wanted, answer))
        script.say(f"{money(cents)} are on their way to you, within five working days. Anything else today?")

    def play_late(self, script: Script) -> None:
        """The fourteen days are over."""
        script.say(
            f"You ordered the {self.product.name} on {self.order.placed}, which is {self.days} days ago. We "
            "refund the difference when a price falls within 14 days of the order, so I can't do it in this "
            "case. I'm sorry."
        )
        script.user("Seriously? It's only a few days. Can't you make an exception?")
        script.say(
            "I see why you ask, but the limit is the same for everyone, and I can't go around it. What "
            "you can do is send it back unused within the time for returns. Is there anything else you "
            "need?"
        )


ERRANDS: tuple[type[Errand], ...] = (WhereIsIt, Cancel, MoveHouse, PriceDrop)
