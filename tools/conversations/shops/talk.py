"""ShopTalk: a talk of an agent and a customer of one invented shop. Must not know: what the customer wants."""

from __future__ import annotations

from random import Random
from typing import Any

from examples_text.script import Script

from conversations import words
from conversations.shops.world import Order, Shop
from conversations.toolset import Talk, Toolset

YES = (
    "Yes[|, please|, go ahead|, do that].",
    "[OK|Fine|Sure], [do it|go ahead].",
    "Please do.",
    "Yes, that's [fine|right].",
)
NO = ("No, [leave it|never mind].", "[Hm|Oh], then [leave it|no].", "No[|, thanks]. I'll think about it.")
MORE = (" Is there anything else?", " Anything else?", " Can I help with anything else?", "", "")


class ShopTalk(Talk):
    """A Talk about one Shop; over is True once somebody else has taken over."""

    def __init__(self, rng: Random, script: Script, toolset: Toolset, shop: Shop) -> None:
        super().__init__(rng, script, toolset)
        self.shop = shop
        self.over = False
        self.named = False  # whether an order has told the customer's name

    def open_order(self, order: Order, *texts: str, remark: str | None = None, **values: Any) -> None:
        """The customer says one of the texts, names the order now or when asked, perhaps wrongly, and it is looked "
        "up."""
        number = order.number
        way = self.rng.choices(("said", "asked", "wrong"), (6, 3, 1))[0]
        if way == "said":
            numbers = (" [The order is|It's order|Order number] {number}.", " Order {number}.", " ({number})")
            self.user(*(text + self.rng.choice(numbers) for text in texts), number=number, **values)
        else:
            self.user(*texts, **values)
            self.say(
                "[Gladly|Of course|I'll look into it]. What is the number of the order?",
                "[I'm happy to help|Let me see]. Which order is it? [I need|Please tell me] its number.",
            )
            if way == "wrong":
                wrong = words.code(self.rng, self.shop.number_form)
                self.user("{wrong}", "It's {wrong}.", wrong=wrong)
                self.call("order", {"error": f"there is no order {wrong}"}, order=wrong)
                self.say("I can't find an order {wrong}. Could you check the number[, please|]?", wrong=wrong)
                self.user("[Sorry|Oh], it's {number}.", "{number}, sorry.", "I meant {number}.", number=number)
            else:
                self.user("{number}", "It's {number}[|, thanks].", "[The number is|Order] {number}.", number=number)
        self.named = True
        self.script.call(remark, self.toolset.call("order", self.shop.shown(order), order=number))

    def answer(self, *texts: str, **values: Any) -> None:
        """The agent says one of the texts, and perhaps asks whether there is more."""
        more = self.rng.choice(MORE)
        self.say(*(text + more for text in texts), **values)
