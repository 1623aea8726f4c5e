"""Errands of the support conversations about the goods themselves: sending back, swapping, advice, points."""

from __future__ import annotations

from datetime import timedelta

from examples_text.script import Script
from examples_text.shop import PRODUCTS, money
from examples_text.support_orders import Errand

WISHES = (  # what to search for, what the customer calls it, and what for
    ("tent", "a tent", "two nights in the hills with a friend"),
    ("jacket", "a jacket", "a wet week on the coast"),
    ("sleeping bag", "a sleeping bag", "sleeping in huts in May"),
    ("trousers", "trousers", "long days in changing weather"),
    ("pack", "a backpack", "a weekend by bike and train"),
)
REASONS = ("It's too heavy for me.", "It's not what I expected.", "I simply don't need it.")


class SendBack(Errand):
    """A return: in time, for shop credit, or too late."""

    def prepare(self) -> None:
        self.product = self.world.take()
        self.limit = 60 if self.world.tier == "Ridge" else 30
        self.days = self.rng.choice((8, 17, self.limit + 12, 71, 104))
        self.order = self.world.order("delivered", self.days + 4, self.days, self.product)
        self.why = self.rng.choice(REASONS)

    def openings(self) -> tuple[str, ...]:
        name = self.product.name
        return (
            f"Hi there, I want to return the {name}. {self.why}",
            f"Can I still send back the {name} from order {self.order.number}? {self.why}",
        )

    def offer(self, outcome: str) -> str:
        """What the customer would get."""
        late = f" The {self.limit} days for a refund are over, but we still give shop credit for it."
        goes = "to the payment method of the order" if outcome == "refund" else "as shop credit"
        return (
            f"Thanks, {self.world.first}. The {self.product.name} came on {self.order.delivered}, which is "
            f"{self.days} days ago.{'' if outcome == 'refund' else late} You would send it back with a "
            f"free label and get {money(self.product.cents)} {goes}, within five working days of its "
            "arrival. Is it unused and complete, and shall I open the return?"
        )

    def play(self, script: Script) -> None:
        self.fetch(script)
        if self.days > 90:
            self.play_late(script)
            return
        outcome = "refund" if self.days <= self.limit else "shop_credit"
        script.say(self.offer(outcome))
        self.agree(script, "Not used at all, the tags are still on. Yes please.", "Unused. Go ahead.")
        number = f"RT-{self.rng.randrange(10000, 99999)}"
        wanted = {"order": self.order.number, "sku": self.product.sku, "outcome": outcome}
        label = f"https://fernhollow.example/labels/{number.lower()}.pdf"
        answer = {"return": number, "label": label, "cents": self.product.cents}
        script.call(None, ("create_return", wanted, answer))
        script.say(
            f"The return {number} is open. The label is here: {label}. Please stick it over the old one and "
            "leave the parcel at any drop-off point within 14 days. Is there anything else?"
        )

    def play_late(self, script: Script) -> None:
        """More than 90 days."""
        script.say(
            f"The {self.product.name} came on {self.order.delivered}, {self.days} days ago. We take unused "
            f"things back for 90 days at most, {self.world.first}, so I can't open a return. If there is "
            f"ever a fault, the warranty is {self.world.years(self.product)}, counted from that day."
        )
        script.user("OK, I thought so. It was worth asking.")
        script.say("Of course it was. Is there anything else I can help you with?")


class Exchange(Errand):
    """Another size or colour, which may be out of stock."""

    def prepare(self) -> None:
        self.product = self.world.take(minimum_options=3)
        self.order = self.world.order("delivered", 11, 7, self.product)
        self.has = self.order.lines[0].option
        self.others = [option for option in self.product.options if option != self.has]
        self.rng.shuffle(self.others)
        self.sold_out = self.rng.random() < 0.5

    def openings(self) -> tuple[str, ...]:
        name, wants = self.product.name, self.others[0]
        return (
            f"Hello, {self.has} isn't right for me in the {name}. Could I swap for {wants}?",
            f"I need a different version of the {name}: {wants} instead of {self.has}.",
        )

    def play(self, script: Script) -> None:
        back = (self.world.today + timedelta(days=23)).isoformat()
        page = self.world.page(self.product, self.product.cents)
        if self.sold_out:
            page["stock"][self.others[0]] = {"count": 0, "next_delivery": back}
        script.call(
            None,
            ("get_order", {"order": self.order.number}, self.order.as_json()),
            ("get_product", {"sku": self.product.sku}, page),
        )
        if self.sold_out:
            self.play_sold_out(script, back)
        self.play_exchange(script, self.others[1] if self.sold_out else self.others[0])

    def play_sold_out(self, script: Script, back: str) -> None:
        """Choose something else."""
        script.say(
            f"I've found it, {self.world.first}: {self.product.name}, {self.has}, delivered on "
            f"{self.order.delivered}. {self.others[0]} is sold out until the next delivery on {back}. What "
            f"we have now is {', '.join(self.others[1:])}. Would that do, or would you rather have a "
            "refund?"
        )
        script.user(f"That's too long to wait. Let's try {self.others[1]} then.")

    def play_exchange(self, script: Script, choice: str) -> None:
        """Confirm and open it."""
        script.say(
            f"Then I would open an exchange for the {self.product.name}: you send {self.has} back with a "
            f"free label, and we put {choice} aside for ten days and send it as soon as your parcel is "
            "scanned. There is one exchange for each line, free of charge. Is yours unused, and shall I "
            "go ahead?"
        )
        self.agree(script, "Yes, I only tried it on at home.", "Unused, yes. Please go ahead.")
        number = f"EX-{self.rng.randrange(10000, 99999)}"
        until = (self.world.today + timedelta(days=10)).isoformat()
        wanted = {"order": self.order.number, "sku": self.product.sku, "outcome": "exchange"}
        answer = {"return": number, "reserved": choice, "until": until}
        script.call(None, ("create_return", {**wanted, "new_option": choice}, answer))
        script.say(
            f"Exchange {number} is open, and {choice} is put aside for you until {until}. You'll get the "
            "label by e-mail in a minute. Anything else?"
        )


class Advice(Errand):
    """Which of several things to buy."""

    def prepare(self) -> None:
        self.query, self.wish, self.use = self.rng.choice(WISHES)

    def openings(self) -> tuple[str, ...]:
        return (
            f"I'm looking for {self.wish} for {self.use}. What would you recommend?",
            f"What do you have for {self.use}? I need {self.wish}, and I don't want to spend too much.",
        )

    def play(self, script: Script) -> None:
        found = sorted((p for p in PRODUCTS if self.query in p.name), key=lambda p: p.cents)
        rows = [{"sku": p.sku, "name": p.name, "price_cents": p.cents, "description": p.note} for p in found]
        script.call(None, ("search_products", {"query": self.query}, {"count": len(rows), "results": rows}))
        listed = "; ".join(f"{p.name}, {money(p.cents)} ({p.note})" for p in found)
        best = found[min(1, len(found) - 1)]
        script.say(f"This is what we have: {listed}. For {self.use} I would take the {best.name}.")
        script.user("Why that one? And do you have it in stock?")
        page = self.world.page(best, best.cents)
        script.call(None, ("get_product", {"sku": best.sku}, page))
        there = ", ".join(f"{option} ({count})" for option, count in page["stock"].items())
        script.say(
            f"Because of what it is: {best.note}. That fits {self.use}, and the warranty is "
            f"{self.world.years(best)}. In stock: {there}. I can't place an order for you, but you'll find "
            f"it in the shop under its number {best.sku}. Is there anything else?"
        )


class Points(Errand):
    """Loyalty points to shop credit."""

    def openings(self) -> tuple[str, ...]:
        return (
            "How many loyalty points do I have, and what are they worth?",
            "I've been collecting points for a while. Can I use them for something?",
        )

    def play(self, script: Script) -> None:
        name, have = self.world.first, self.world.points
        usable = have // 100 * 100
        if usable == 0:
            script.say(
                f"You have {have} points, {name}. They can be exchanged in whole hundreds, for 5 euros of "
                "shop credit each, so there are a few missing still. Is there anything else?"
            )
            return
        credit = usable // 100 * 500
        script.say(
            f"You have {have} points, {name}. {usable} of them can be turned into {money(credit)} of shop "
            "credit; the rest stays. Points cannot be paid out. Shall I exchange them?"
        )
        self.agree(script, "Yes, all of them.", "Go on then.")
        wanted = {"customer": self.world.customer, "points": usable}
        script.call(None, ("redeem_points", wanted, {"credit_cents": credit, "points_left": have - usable}))
        script.say(f"Done: {money(credit)} of credit are in your account, {have - usable} points are left.")


ERRANDS: tuple[type[Errand], ...] = (SendBack, Exchange, Advice, Points)
