"""Shop: an invented shop with its goods, its rules and its numbers, and one customer with an order or two.

Money is in cents. Must not know: what anyone says.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import Any

from conversations import words

THEMES = {  # what a shop sells, and what there is of it
    "kitchen things": "kettle toaster pan pot teapot whisk grater knife cutting board mixing bowl scale toaster",
    "bicycles": "city bike road bike saddle helmet bike lock pump bell front light basket bottle cage mudguard",
    "toys": "puzzle kite doll train set spinning top marble run teddy bear building set rocking horse yo-yo",
    "stationery": "fountain pen notebook desk lamp paper tray stapler calendar ink set ruler pencil case globe",
    "garden tools": "spade rake watering can hedge trimmer wheelbarrow garden hose bird house seed set lawn mower",
    "instruments": "guitar violin bow keyboard drum ukulele metronome music stand flute microphone harmonica tuner",
    "furniture": "armchair bookshelf desk bed frame wardrobe stool mirror sideboard coat stand sofa side table",
    "electronics": "headphones loudspeaker keyboard monitor phone case charger camera tablet router webcam radio",
    "shoes": "sneakers sandals rubber boots slippers ankle boots running shoes loafers clogs hiking boots",
    "pet supplies": "dog bed cat tree fish tank leash bird cage food bowl scratching post carrier hamster wheel",
    "lamps": "floor lamp desk lamp ceiling lamp lantern reading light night light wall lamp garden light",
    "craft supplies": "yarn set sewing machine easel paint set knitting needles loom clay set brush set frame",
}
_PAIRS = {  # the goods of two words, which the lists above do not tell apart
    "cutting board", "mixing bowl", "city bike", "road bike", "bike lock", "front light", "bottle cage", "train set",
    "spinning top", "marble run", "teddy bear", "building set", "rocking horse", "fountain pen", "desk lamp",
    "paper tray", "ink set", "pencil case", "watering can", "hedge trimmer", "garden hose", "bird house", "seed set",
    "lawn mower", "music stand", "violin bow", "bed frame", "coat stand", "side table", "phone case", "rubber boots",
    "ankle boots", "running shoes", "hiking boots", "dog bed", "cat tree", "fish tank", "bird cage", "food bowl",
    "scratching post", "hamster wheel", "floor lamp", "ceiling lamp", "reading light", "night light", "wall lamp",
    "garden light", "yarn set", "sewing machine", "paint set", "knitting needles", "clay set", "brush set",
}  # fmt: skip
NAMES = (
    "{name} & Co",
    "{name}",
    "The {town} Store",
    "{name} {what}",
    "{town} {what}",
    "{name} Brothers",
    "House of {name}",
)
WHAT = ("Supplies", "Goods", "Trading", "Workshop", "Shop", "Direct", "Market", "Depot")
CURRENCIES = ("€{}", "£{}", "${}", "{} euros")
ORDER_NUMBERS = ("A-99999", "899-999999", "W999999", "89999999", "AA99999", "ORD-8999", "R8999-99", "AAA-8999")
COLOURS = ("red", "blue", "green", "black", "white", "grey", "oak", "yellow", "silver", "beige")
CARRIERS = ("Northline", "ParcelWorks", "Swiftvan", "Redpost", "QuickCart", "Harbour Freight", "Bluebird", "Roadrunner")


def goods(theme: str) -> list[str]:
    """What a theme's shop sells; neighbours that belong together are one thing."""
    found: list[str] = []
    for word in THEMES[theme].split():
        if found and f"{found[-1]} {word}" in _PAIRS:
            found[-1] += f" {word}"
        else:
            found.append(word)
    return list(dict.fromkeys(found))


GOODS = {theme: goods(theme) for theme in THEMES}


@dataclass
class Item:
    """A thing for sale."""

    number: str
    name: str
    cents: int
    stock: int


@dataclass
class Order:
    """An order; days are None until they happen."""

    number: str
    status: str
    item: Item
    count: int
    placed: date
    delivered: date | None
    tracking: str

    @property
    def cents(self) -> int:
        """What the items cost."""
        return self.item.cents * self.count


class Shop:
    """One shop on one day, with one customer."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.today = words.day(rng)
        self.theme = rng.choice(list(THEMES))
        values = {"name": words.family_name(rng), "town": words.town(rng), "what": rng.choice(WHAT)}
        self.name = rng.choice(NAMES).format(**values)
        self.currency = rng.choice(CURRENCIES)
        self.number_form = rng.choice(ORDER_NUMBERS)
        self.sku_form = rng.choice(("AA-899", "8999", "A8999", "AAA89", "P-9999"))
        brands = rng.sample(words.GIVEN, 12)
        things = rng.sample(GOODS[self.theme], min(7, len(GOODS[self.theme])))
        styled = rng.random() < 0.6
        self.items = [
            Item(
                words.code(rng, self.sku_form),
                f"{brand} {thing}" if styled else f"{rng.choice(COLOURS)} {thing}",
                rng.choice(
                    (rng.randrange(5, 40) * 100, rng.randrange(10, 400) * 100, rng.randrange(400, 9000) * 10 + 9)
                ),
                rng.choice((0, rng.randrange(1, 60), rng.randrange(1, 60))),
            )
            for brand, thing in zip(brands, things, strict=False)
        ]
        self.return_days = rng.choice((14, 15, 20, 21, 28, 30, 40, 45, 60, 90, 100))
        self.shipping = rng.choice((290, 390, 450, 495, 500, 590, 650, 700))
        self.free_from = rng.choice((2500, 3000, 4000, 5000, 6000, 7500, 8000, 10000))
        self.delivery = rng.choice(("one to two", "two to three", "two to four", "three to five", "five to seven"))
        self.warranty = rng.choice((1, 2, 3, 5, 10))
        self.refund_days = rng.choice((2, 3, 5, 7, 10, 14))
        self.opens, self.closes = rng.randrange(7, 11), rng.randrange(16, 21)
        self.phone = words.code(rng, "0899 999999")
        self.first, self.last = words.given_name(rng), words.family_name(rng)
        self.email = words.email(rng, self.first, self.last)
        self.address = words.address(rng)
        self.rules: list[str] = []  # what its agent is told

    def facts(self) -> dict[str, object]:
        """What the rules state, as it is said."""
        return {
            "name": self.name,
            "theme": self.theme,
            "return_days": self.return_days,
            "refund_days": self.refund_days,
            "shipping": self.money(self.shipping),
            "free_from": self.money(self.free_from),
            "delivery": self.delivery,
            "warranty": words.plural(self.warranty, "year"),
            "opens": self.opens,
            "closes": self.closes,
            "phone": self.phone,
            "today": self.today,
        }

    def money(self, cents: int) -> str:
        """An amount as this shop writes it."""
        whole = f"{cents // 100}" if cents % 100 == 0 else f"{cents // 100}.{cents % 100:02d}"
        return self.currency.format(whole)

    def order(self, status: str, days: int | None = None) -> Order:
        """A new order; delivered so many days ago if days is given."""
        rng = self.rng
        item = self.items[rng.randrange(len(self.items))]
        placed = self.today - timedelta(days=(days or 0) + rng.randrange(1, 6))
        delivered = None if days is None else self.today - timedelta(days=days)
        count = rng.choice((1, 1, 1, 2, 3))
        tracking = words.code(rng, rng.choice(("AA999999999", "89999999999", "A-9999-9999")))
        return Order(words.code(rng, self.number_form), status, item, count, placed, delivered, tracking)

    def shown(self, order: Order) -> dict[str, Any]:
        """An order as the shop's functions return it."""
        delivered = order.delivered
        since = {} if delivered is None else {"days_since_delivery": (self.today - delivered).days}
        return {
            "order": order.number,
            "status": order.status,
            "customer": f"{self.first} {self.last}",
            "placed": str(order.placed),
            **({} if delivered is None else {"delivered": str(delivered), **since}),
            "items": [{"number": order.item.number, "name": order.item.name, "count": order.count}],
            "total": self.money(order.cents),
            "address": f"{self.address['street']}, {self.address['town']}",
            **({"tracking": order.tracking} if order.status in ("shipped", "delivered") else {}),
        }

    def on_sale(self, item: Item) -> dict[str, Any]:
        """A thing as the search returns it."""
        return {"number": item.number, "name": item.name, "price": self.money(item.cents), "in_stock": item.stock}
