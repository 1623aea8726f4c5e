"""Errands of the support conversations about things that are broken, on arrival or later."""

from __future__ import annotations

from typing import Any

from examples_text.script import Script
from examples_text.shop import money
from examples_text.support_orders import Errand

SOFT = (
    "one of the seams is open for about ten centimetres",
    "a thread has come loose and there is a hole next to it",
    "the fabric is torn near the edge",
)
HARD = (
    "there is a dent and the paint has come off",
    "one part is cracked right through",
    "it's bent and does not close any more",
)
HARD_KINDS = ("ST", "LT", "PL", "BT")
PARTS = {"JK": "zip", "TR": "seam", "SH": "seam", "TN": "pole", "SB": "zip", "BP": "buckle", "PL": "pole"}
REPAIR_EUROS = {"zip": 15, "buckle": 15, "pole": 25, "seam": 35}


class Fault(Errand):
    """What both kinds of claim share."""

    def photo(self) -> str:
        """The reference of an upload."""
        return f"upload-{self.rng.randrange(16**6):06x}"

    def claim(self, script: Script, wanted: dict[str, Any], answer: dict[str, Any]) -> str:
        """Open a claim for the first line of the order; returns its number."""
        number = f"CL-{self.rng.randrange(10000, 99999)}"
        about = {"order": self.order.number, "sku": self.order.lines[0].product.sku, **wanted}
        script.call(None, ("create_claim", about, {"claim": number, **answer}))
        return number


class Damaged(Fault):
    """Something that arrived broken."""

    def prepare(self) -> None:
        self.product = self.world.take()
        self.order = self.world.order("delivered", 6, 2, self.product)
        self.fault = self.rng.choice(HARD if self.product.sku[:2] in HARD_KINDS else SOFT)
        self.wish = self.rng.choice(("replacement", "refund"))

    def openings(self) -> tuple[str, ...]:
        name = self.product.name
        return (
            f"The {name} arrived broken. I'm quite disappointed, I had been looking forward to this.",
            f"I just opened the parcel from order {self.order.number}: there's damage on the {name}.",
        )

    def play(self, script: Script) -> None:
        photo = self.photo()
        self.fetch(script, f"I'm sorry to hear that, {self.world.first}. Let me see the order.")
        script.say(
            f"Here it is, delivered on {self.order.delivered}. Could you tell me what exactly is broken, and "
            "upload a photo of it? And would you like a replacement or your money back?"
        )
        script.user(f"Sure: {self.fault}. Photo attached [{photo}]. A {self.wish} would be good.")
        keep = self.product.cents < 4000
        back = "You don't have to send it back." if keep else "You'll get a label and 14 days to send it."
        refund = f"{money(self.product.cents)} are refunded"
        script.say(
            "Thank you, that is clearly visible. I would open a claim for damage on arrival: "
            f"{'a new one leaves today' if self.wish == 'replacement' else refund}, at no cost to you. "
            f"{back} Shall I do that?"
        )
        self.agree(script, "Yes, thanks for making it easy.", "OK, do it.")
        description = self.fault[0].upper() + self.fault[1:]
        wanted = {"kind": "damaged", "description": description, "photo": photo, "wish": self.wish}
        number = self.claim(script, wanted, {"accepted": True, "started": self.wish, "send_back": not keep})
        script.say(
            f"Claim {number} is accepted and the {self.wish} has been started. I'm sorry for the trouble. "
            "Is there anything else?"
        )


class Warranty(Fault):
    """Something that broke after a year or more."""

    def prepare(self) -> None:
        self.product = self.world.take(kinds=tuple(PARTS))
        self.part = PARTS[self.product.sku[:2]]
        limit = 365 * self.product.warranty
        self.days = self.rng.choice((290, 340, limit - 60, limit + 80))
        self.inside = self.days <= limit
        self.order = self.world.order("delivered", self.days + 3, self.days, self.product)

    def openings(self) -> tuple[str, ...]:
        name = self.product.name
        return (
            f"A {self.part} on my {name} broke on the second day of our trip. Is that covered?",
            f"Hi, I have a problem with the {name} I bought a while ago: a {self.part} has given up.",
        )

    def verdict(self) -> str:
        """Whether the warranty covers it, and what happens then."""
        name, years = self.world.first, self.world.years(self.product)
        came = self.order.delivered
        since = f"{name}, your order with the {self.product.name} came on {came}, and the warranty"
        if self.inside:
            return (
                f"{since} is {years}, so a broken {self.part} is covered. Please describe briefly how it "
                "happened and upload a photo. I would then open a claim, and the workshop answers within six "
                "working days: it repairs if it can and replaces if it cannot. Is that all right?"
            )
        return (
            f"{since} of {years} is over. The workshop can still repair it: for a {self.part} that is "
            f"{REPAIR_EUROS[self.part]} euros, to be paid after the work. If you like, describe the damage "
            "and upload a photo, and I'll open a repair."
        )

    def play(self, script: Script) -> None:
        photo = self.photo()
        script.call(
            "I'll check the order and how long the warranty is.",
            ("get_order", {"order": self.order.number}, self.order.as_json()),
            ("get_product", {"sku": self.product.sku}, self.world.page(self.product, self.product.cents)),
        )
        script.say(self.verdict())
        script.user(f"It just came apart, I didn't use any force at all. [{photo}] Yes, please open it.")
        description = f"The {self.part} came apart in normal use"
        wanted = {"kind": "warranty", "description": description, "photo": photo, "wish": "repair"}
        cents = 0 if self.inside else REPAIR_EUROS[self.part] * 100
        number = self.claim(script, wanted, {"cost_cents": cents, "answer_within_working_days": 6})
        script.say(
            f"Claim {number} is with the workshop now. You'll hear from them by e-mail within six working "
            "days, and they will send a label if they need to see it. Is there anything else?"
        )


ERRANDS: tuple[type[Errand], ...] = (Damaged, Warranty)
