"""What the support agent may call."""

from __future__ import annotations

from pathlib import Path

from examples_text.script import function

POLICY = (Path(__file__).parent / "prompts" / "support.txt").read_text(encoding="utf-8").strip()

ORDER = "The order number, F and six digits."
SKU = "The product's number, such as TN-4002."

TOOLS = [
    function(
        "find_customer",
        "Find an account by e-mail address, or by order number and postcode. Returns the profile, the "
        "numbers of recent orders, and today's date.",
        {},
        email="The e-mail address of the account.",
        order="The order number, F and six digits; needs postcode.",
        postcode="The postcode of the delivery address.",
    ),
    function("get_order", "Everything about one order: lines, dates, payment, address.", {"order": ORDER}),
    function(
        "track_parcel",
        "The carrier's events for one parcel, newest first, and the expected day.",
        {"tracking": "The tracking number of a shipped order."},
    ),
    function(
        "hold_parcel",
        "Ask the carrier to keep a parcel at a pickup point, or to bring it on another day.",
        {"tracking": "The tracking number of a shipped order."},
        pickup_point="The name of the pickup point.",
        day={"type": "string", "format": "date", "description": "The day of the new delivery."},
    ),
    function(
        "get_product",
        "Price, warranty, description, and the stock of each option, with the date of the next delivery.",
        {"sku": SKU},
    ),
    function(
        "search_products",
        "Products whose name or description fits, cheapest first.",
        {"query": "A few words."},
        max_price_cents={"type": "integer", "description": "Leave dearer ones out."},
    ),
    function("cancel_order", "Cancel an order that is still processing, and refund it.", {"order": ORDER}),
    function(
        "update_address",
        "Change where an order goes that is still processing.",
        {"order": ORDER, "street": "Number and street.", "town": "Town.", "postcode": "Postcode."},
    ),
    function(
        "create_return",
        "Open a return or an exchange for one line of an order. Returns its number and the label.",
        {
            "order": ORDER,
            "sku": SKU,
            "outcome": {"type": "string", "enum": ["refund", "shop_credit", "exchange"]},
        },
        new_option="For an exchange: the size or colour that is wanted.",
    ),
    function(
        "create_claim",
        "Open a claim. Returns its number and what happens next.",
        {
            "order": ORDER,
            "kind": {"type": "string", "enum": ["damaged", "wrong_item", "missing", "lost", "warranty"]},
            "description": "What is wrong, in the customer's words.",
        },
        sku=SKU,
        photo="The reference of an uploaded photo.",
        wish={"type": "string", "enum": ["replacement", "refund", "repair"]},
    ),
    function(
        "issue_refund",
        "Refund an amount to the payment method of an order.",
        {"order": ORDER, "cents": {"type": "integer", "minimum": 1}, "reason": "One line for the invoice."},
    ),
    function(
        "redeem_points",
        "Turn loyalty points into shop credit.",
        {"customer": "The customer's number.", "points": {"type": "integer", "multipleOf": 100}},
    ),
    function("transfer", "Hand the chat over to a colleague.", {"summary": "What is known so far."}),
]
