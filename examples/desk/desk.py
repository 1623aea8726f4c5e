"""The chat desk of a kitchen shop: 8 tools on a database of the episode's own, its customer, and a checker.

Of a line of tasks.jsonl, `metadata` has the `orders` that the database begins with, the `replies` of the customer,
and what the checker wants: `expect`, the rows that differ at the end, and `said`, texts that the agent writes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import date
from typing import Any

from apcbatch import Tools

TODAY = date(2026, 5, 13)  # as the system prompt says; no tool reads the clock
ITEMS = (  # number, name, cents, stock
    ("KT-204", "green kettle", 3900, 12),
    ("KT-231", "steel teapot", 2750, 0),
    ("TS-118", "red toaster", 4590, 7),
    ("PN-302", "iron pan", 5400, 3),
    ("PN-340", "copper pot", 8900, 1),
    ("WH-015", "long whisk", 900, 64),
    ("GR-027", "fine grater", 1250, 31),
    ("KN-410", "bread knife", 2200, 9),
    ("KN-433", "paring knife", 1100, 40),
    ("BD-501", "oak cutting board", 3300, 18),
    ("BW-612", "blue mixing bowl", 1800, 25),
    ("SC-707", "flat scale", 2950, 5),
)
COLUMNS = (
    "number", "customer", "status", "placed", "delivered", "street", "town", "postcode", "tracking", "last_scan",
    "expected",
)  # fmt: skip
SCHEMA = f"""
create table items (number text primary key, name text, cents integer, stock integer);
create table orders ({", ".join(COLUMNS)}, primary key (number));
create table order_items (number text, item text, count integer, primary key (number, item));
create table cases (id integer primary key, kind text, number text, item text, note text, unique (kind, number, item));
"""


def function(name: str, about: str, **parameters: str) -> dict[str, Any]:
    """Return a function in OpenAI's form. parameters: their descriptions, with `?` before that of an optional one."""
    properties = {key: {"type": "string", "description": text.lstrip("?")} for key, text in parameters.items()}
    required = [key for key, text in parameters.items() if not text.startswith("?")]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


ORDER, ITEM = "The number of the order.", "The number of the item."
PLACE = {"street": "Number and street.", "town": "The town.", "zip": "The postcode."}
FUNCTIONS = (
    function("get_order", "Everything about an order.", order=ORDER),
    function("get_tracking", "The last scan of a parcel and the expected day.", tracking="The tracking number."),
    function("search_items", "Things for sale whose name fits, with price and stock.", text="A part of the name."),
    function("cancel", "Cancel an order that has not been sent.", order=ORDER),
    function("set_address", "Change where an order goes that has not been sent.", order=ORDER, **PLACE),
    function("open_return", "Open a return. Returns its number.", order=ORDER, item=ITEM, note="?Why it comes back."),
    function("open_claim", "Report something broken or missing.", order=ORDER, item=ITEM, description="What is wrong."),
    function("escalate", "Hand the chat over to a colleague.", summary="What it is about."),
)
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in FUNCTIONS}


class Refusal(Exception):
    """What a tool says to the agent in place of a result."""


class Desk(Tools):
    """One episode. The tools refuse what the shop cannot do; what it should not do, such as taking something back
    after 30 days, is for the agent to know."""

    tools: Sequence[dict[str, Any]] = FUNCTIONS

    def __init__(self, row: dict[str, Any], sample: int = 0) -> None:
        """Make the database in memory: the same one for the same line."""
        super().__init__(row, sample)
        self.task = row["metadata"]
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.db.row_factory = sqlite3.Row
        self.db.executescript(SCHEMA)
        self.db.executemany("insert into items values (?, ?, ?, ?)", ITEMS)
        for order in self.task["orders"]:
            marks = ", ".join("?" * len(COLUMNS))
            self.db.execute(f"insert into orders values ({marks})", [order.get(column) for column in COLUMNS])
            items = [(order["number"], *item) for item in order["items"].items()]
            self.db.executemany("insert into order_items values (?, ?, ?)", items)

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return what the method of that name returns, or {"error": a sentence}. Models send any arguments."""
        known, needed = SCHEMAS[name]["properties"], SCHEMAS[name]["required"]
        texts = all(isinstance(value, str) for value in arguments.values())
        if not (texts and set(needed) <= set(arguments) <= set(known)):
            return {"error": f"{name} takes texts for {', '.join(known)}, and needs {', '.join(needed)}"}
        try:
            result: dict[str, Any] = getattr(self, name)(**arguments)
            return result
        except (Refusal, UnicodeEncodeError) as error:  # SQLite takes no half of a surrogate pair
            return {"error": str(error)}

    def next(self, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The customer: answers a question with the next of the replies, and leaves when there is no question."""
        spoken = {message["content"] for message in messages if message["role"] == "user"}
        left = [reply for reply in self.task["replies"] if reply not in spoken]
        return {"role": "user", "content": left[0]} if left and "?" in (messages[-1]["content"] or "") else None

    def score(self, messages: list[dict[str, Any]]) -> dict[str, float]:
        """reward: 1 if the expected rows and no others have changed (state), and the agent wrote what it should."""
        texts = "\n".join(message["content"] or "" for message in messages if message["role"] == "assistant")
        state = self.changes() == self.task["expect"]
        said = all(text in texts for text in self.task["said"])
        return {"reward": float(state and said), "state": float(state), "said": float(said)}

    def close(self) -> None:
        self.db.close()

    def changes(self) -> dict[str, Any]:
        """Return the changed columns of each order, and the new cases without their notes, which are free text."""
        changed: dict[str, dict[str, Any]] = {}
        for order in self.task["orders"]:
            now = self.order(order["number"])
            if new := {column: now[column] for column in COLUMNS if now[column] != order.get(column)}:
                changed[order["number"]] = new
        cases = self.db.execute("select kind, number, item from cases order by kind, number, item")
        return {"orders": changed, "cases": [list(case) for case in cases]}

    # The tools

    def get_order(self, order: str) -> dict[str, Any]:
        row = self.order(order)
        query = "select items.*, count from items join order_items on items.number = item where order_items.number = ?"
        items = self.db.execute(query + " order by order_items.rowid", (order,)).fetchall()
        delivered = row["delivered"]
        shown = {
            "order": order,
            "status": row["status"],
            "customer": row["customer"],
            "placed": row["placed"],
            "delivered": delivered,
            "days_since_delivery": delivered and (TODAY - date.fromisoformat(delivered)).days,
            "items": [{key: item[key] for key in ("number", "name", "count")} for item in items],
            "total": euros(sum(item["cents"] * item["count"] for item in items)),
            "address": f"{row['street']}, {row['town']}",
            "tracking": row["tracking"],
        }
        return {key: value for key, value in shown.items() if value is not None}

    def get_tracking(self, tracking: str) -> dict[str, Any]:
        row = self.db.execute("select * from orders where tracking = ?", (tracking,)).fetchone()
        if row is None:
            raise Refusal(f"there is no parcel {tracking}")
        if row["delivered"]:
            return {"status": "delivered", "day": row["delivered"]}
        return {"status": "on its way", "last_scan": row["last_scan"], "expected": row["expected"]}

    def search_items(self, text: str) -> dict[str, Any]:
        found = self.db.execute("select * from items where instr(name, lower(?)) order by cents", (text,))
        return {"found": [{"number": n, "name": name, "price": euros(c), "in_stock": s} for n, name, c, s in found]}

    def cancel(self, order: str) -> dict[str, Any]:
        self.order(order, "processing")
        self.db.execute("update orders set status = 'cancelled' where number = ?", (order,))
        return {"order": order, "status": "cancelled"}

    def set_address(self, order: str, street: str, town: str, zip: str) -> dict[str, Any]:
        self.order(order, "processing")
        values = (street, town, zip, order)
        self.db.execute("update orders set street = ?, town = ?, postcode = ? where number = ?", values)
        return {"order": order, "address": f"{street}, {town}, {zip}"}

    def open_return(self, order: str, item: str, note: str = "") -> dict[str, Any]:
        return {"return": f"RT-{self.case('return', order, item, note)}", "label": "sent by e-mail"}

    def open_claim(self, order: str, item: str, description: str) -> dict[str, Any]:
        return {"case": f"C-{self.case('claim', order, item, description)}", "answer_within_days": 3}

    def escalate(self, summary: str) -> dict[str, Any]:
        self.db.execute("insert or ignore into cases values (null, 'person', '', '', ?)", (summary,))
        return {"ok": True, "waiting_minutes": 4}

    # What they share

    def order(self, number: str, status: str | None = None) -> sqlite3.Row:
        """Return an order; a Refusal if there is none, or it is not in that status."""
        row: sqlite3.Row | None = self.db.execute("select * from orders where number = ?", (number,)).fetchone()
        if row is None:
            raise Refusal(f"there is no order {number}")
        if status not in (None, row["status"]):
            raise Refusal(f"order {number} is {row['status']}, not {status}")
        return row

    def case(self, kind: str, number: str, item: str, note: str) -> int:
        """Open a case about an item of a delivered order, once, and return its number."""
        self.order(number, "delivered")
        if not self.db.execute("select 1 from order_items where number = ? and item = ?", (number, item)).fetchone():
            raise Refusal(f"order {number} has no item {item}")
        self.db.execute("insert or ignore into cases values (null, ?, ?, ?, ?)", (kind, number, item, note))
        query = "select id from cases where kind = ? and number = ? and item = ?"
        return 8000 + int(self.db.execute(query, (kind, number, item)).fetchone()["id"])


def euros(cents: int) -> str:
    """€39 for 3900, €45.90 for 4590."""
    return f"€{cents // 100}" if cents % 100 == 0 else f"€{cents / 100:.2f}"
