"""The shop of the support conversations: what it sells, who buys there, what they ordered.

Money is in cents, dates are days. Must not know: what anyone says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, timedelta
from random import Random
from typing import Any


@dataclass(frozen=True)
class Product:
    """A thing for sale; options are its sizes or colours, warranty is in years."""

    sku: str
    name: str
    cents: int
    options: tuple[str, ...]
    warranty: int
    note: str


SIZES = ("XS", "S", "M", "L", "XL")
SHOES = ("EU 38", "EU 39", "EU 40", "EU 41", "EU 42", "EU 43", "EU 44")
PRODUCTS = (
    Product("JK-2210", "Skerry rain jacket", 18900, SIZES, 2, "three layers, taped seams, 410 g"),
    Product("JK-2245", "Lowland wind shell", 8900, SIZES, 2, "one layer, packs into its pocket, 120 g"),
    Product("JK-2301", "Hearth down jacket", 24900, SIZES, 2, "800 fill power, hood, 380 g"),
    Product("TR-1104", "Moraine trekking trousers", 11900, SIZES, 2, "stretch, zip-off legs, 390 g"),
    Product("TR-1127", "Sedge rain trousers", 9900, SIZES, 2, "full side zips, 280 g"),
    Product("SH-3008", "Cairn walking boots", 19900, SHOES, 2, "leather, can be resoled, 620 g a boot"),
    Product("SH-3015", "Drift trail shoes", 12900, SHOES, 1, "4 mm drop, wide toe box, 290 g a shoe"),
    Product("SH-3040", "Hut slippers", 4900, SHOES, 1, "boiled wool, rubber sole"),
    Product("TN-4001", "Plover one-person tent", 27900, ("green", "sand"), 5, "1.1 kg, one pole"),
    Product("TN-4002", "Plover two-person tent", 35900, ("green", "sand"), 5, "1.6 kg, two doors"),
    Product("TN-4010", "Curlew family tent", 64900, ("sand",), 5, "four people, 6.2 kg, standing height"),
    Product("SB-5003", "Marten sleeping bag", 21900, ("regular", "long"), 3, "down, comfort 0 °C, 890 g"),
    Product("SB-5011", "Vole summer bag", 9900, ("regular", "long"), 3, "synthetic, comfort 10 °C, 760 g"),
    Product("MT-5202", "Raft sleeping mat", 13900, ("regular", "wide"), 3, "insulated, R 4.2, 480 g"),
    Product("BP-6004", "Tarn 28 daypack", 10900, ("slate", "rust", "moss"), 5, "28 litres, 840 g"),
    Product("BP-6011", "Fell 55 backpack", 22900, ("S/M", "M/L"), 5, "55 litres, adjustable back, 1.5 kg"),
    Product("BP-6018", "Beck dry bag set", 3900, ("blue", "orange"), 1, "three bags of 5, 10 and 20 litres"),
    Product("ST-7001", "Ember gas stove", 6900, ("brass", "black"), 2, "86 g, boils a litre in 3.5 minutes"),
    Product("ST-7012", "Kiln cook set", 7900, ("two people", "four people"), 2, "hard-anodised, nested pots"),
    Product("LT-7105", "Lantern head torch", 5400, ("grey", "yellow"), 3, "400 lumens, charges by USB-C"),
    Product("PL-7203", "Alder trekking poles", 9900, ("110 cm", "120 cm", "130 cm"), 3, "aluminium, folding"),
    Product("BT-7301", "Spring steel bottle", 3200, ("0.75 l", "1 l"), 1, "keeps cold for 20 hours"),
    Product("GL-8002", "Ptarmigan gloves", 5900, SIZES, 1, "wool lining, works on touch screens"),
    Product("HT-8010", "Bilberry wool hat", 2900, ("red", "blue", "oat"), 1, "merino, made in one piece"),
)

FIRST = (
    "Agnes", "Tomasz", "Priya", "Leon", "Marguerite", "Idris", "Hanna", "Callum", "Beatriz",
    "Yusuf", "Ingrid", "Mateo", "Nadia", "Fergus", "Chiara", "Oskar", "Amara", "Rowan", "Sunniva",
    "Dmitri", "Elodie", "Kwame", "Petra", "Gareth", "Leila", "Bram",
)
LAST = (
    "Whitcombe", "Kowalczyk", "Raman", "Feldt", "Aubert", "Mensah", "Lindqvist", "Drummond",
    "Carvalho", "Demir", "Solberg", "Herrera", "Petrova", "Gallagher", "Bianchi", "Nyberg",
    "Okafor", "Thistlewood", "Halvorsen", "Sokolov", "Garnier", "Boateng", "Novak", "Pritchard",
    "Haddad", "Visser",
)
STREETS = (
    "Orchard Lane",
    "Mill Street",
    "Canal Walk",
    "Chapel Hill",
    "Station Road",
    "Quarry Close",
    "Harbour View",
    "Larch Avenue",
    "Weaver's Yard",
    "North Parade",
)
TOWNS = (
    ("Aldermoor", "AM4 2LT"),
    ("Kestrel Bay", "KB1 7QP"),
    ("Thornby", "TB9 3HN"),
    ("Wexcombe", "WX2 8EA"),
    ("Saltmarsh", "SM6 1DR"),
    ("Great Harrow", "GH3 5YB"),
    ("Lindale", "LD7 4FK"),
    ("Pennyford", "PF5 9WJ"),
)
CARRIERS = ("Northline", "ParcelWorks", "Swiftvan")


def money(cents: int) -> str:
    """An amount as it is said to a customer."""
    return f"€{cents // 100}.{cents % 100:02d}"


@dataclass
class Line:
    """One row of an order."""

    product: Product
    option: str
    quantity: int

    def as_json(self) -> dict[str, Any]:
        """The row as get_order shows it."""
        price = self.product.cents
        return {
            "sku": self.product.sku,
            "name": self.product.name,
            "option": self.option,
            "quantity": self.quantity,
            "unit_price_cents": price,
        }


@dataclass
class Order:
    """An order; days are counted back from today, shipped and delivered are None until they happen."""

    number: str
    status: str
    placed: date
    shipped: date | None
    delivered: date | None
    carrier: str
    tracking: str
    payment: str
    address: dict[str, str]
    lines: list[Line] = field(default_factory=list)

    @property
    def cents(self) -> int:
        """The sum of the rows."""
        return sum(line.product.cents * line.quantity for line in self.lines)

    @property
    def shipping_cents(self) -> int:
        """What shipping cost: free from 75 euros."""
        return 0 if self.cents >= 7500 else 590

    @property
    def total_cents(self) -> int:
        """What was paid."""
        return self.cents + self.shipping_cents

    def as_json(self) -> dict[str, Any]:
        """The order as get_order shows it."""
        return {
            "order": self.number,
            "status": self.status,
            "placed": self.placed.isoformat(),
            "shipped": self.shipped and self.shipped.isoformat(),
            "delivered": self.delivered and self.delivered.isoformat(),
            "lines": [line.as_json() for line in self.lines],
            "shipping_cents": self.shipping_cents,
            "total_cents": self.total_cents,
            "payment": self.payment,
            "ship_to": self.address,
            "carrier": self.carrier if self.shipped else None,
            "tracking": self.tracking if self.shipped else None,
        }


class World:
    """One customer on one day, and the orders that the conversation will need."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.today = date(2025, 3, 3) + timedelta(days=rng.randrange(200))
        self.first, self.last = rng.choice(FIRST), rng.choice(LAST)
        provider = rng.choice(("postbox", "fastmail", "inbox"))
        self.email = f"{self.first}.{self.last}@{provider}.example".lower()
        self.address = self.new_address()
        self.points = rng.randrange(2, 90) * 10
        self.tier = "Ridge" if self.points >= 400 else "Valley"
        self.customer = f"C-{rng.randrange(20000, 99999)}"
        self.orders: list[Order] = []
        self.sold = rng.sample(PRODUCTS, len(PRODUCTS))

    def new_address(self) -> dict[str, str]:
        """Somewhere to send a parcel."""
        town, postcode = self.rng.choice(TOWNS)
        street = f"{self.rng.randrange(1, 140)} {self.rng.choice(STREETS)}"
        return {"street": street, "town": town, "postcode": postcode}

    def order(self, status: str, placed: int, delivered: int | None, *products: Product) -> Order:
        """A new order of these products and a few more; ages are in days."""
        rng = self.rng
        carrier = rng.choice(CARRIERS)
        shipped = None if status in ("processing", "packed") else self.today - timedelta(days=placed - 1)
        order = Order(
            f"F{rng.randrange(410000, 499999)}",
            status,
            self.today - timedelta(days=placed),
            shipped,
            None if delivered is None else self.today - timedelta(days=delivered),
            carrier,
            f"{carrier[0]}{rng.randrange(10**9, 10**10)}",
            rng.choice((f"card ending {rng.randrange(1000, 9999)}", "PayPal", "bank transfer")),
            self.address,
        )
        for product in (*products, *(self.sold.pop() for _ in range(rng.randrange(1, 4)))):
            order.lines.append(Line(product, rng.choice(product.options), 1))
        self.orders.append(order)
        return order

    def take(self, minimum_options: int = 1, kinds: tuple[str, ...] = ("",)) -> Product:
        """A product that no order has yet; its number starts with one of kinds."""
        for product in self.sold:
            if len(product.options) >= minimum_options and product.sku.startswith(kinds):
                self.sold.remove(product)
                return product
        raise LookupError("the shop sells nothing like that")

    def years(self, product: Product) -> str:
        """The warranty in words."""
        return f"{product.warranty} year{'s' if product.warranty > 1 else ''}"

    def page(self, product: Product, cents: int) -> dict[str, Any]:
        """The product as get_product shows it."""
        return {
            "sku": product.sku,
            "name": product.name,
            "price_cents": cents,
            "warranty_years": product.warranty,
            "description": product.note,
            "stock": {option: self.rng.randrange(2, 30) for option in product.options},
        }

    def profile(self) -> dict[str, Any]:
        """The customer as find_customer shows them."""
        return {
            "customer": self.customer,
            "name": f"{self.first} {self.last}",
            "email": self.email,
            "default_address": self.address,
            "loyalty": {"tier": self.tier, "points": self.points},
            "orders": [order.number for order in reversed(self.orders)],
            "today": self.today.isoformat(),
        }
