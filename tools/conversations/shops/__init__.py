"""Support conversations of shops that are made up: their goods, their rules, their functions, their customers.

Where `support` is one shop with one policy, here the rules and the tools have to be read. Must not know: tokens.
"""

from __future__ import annotations

from random import Random

from examples_text.script import Script

from conversations.plain.small_talk import greet
from conversations.shops.orders import ORDER_ERRANDS
from conversations.shops.questions import QUESTION_ERRANDS
from conversations.shops.talk import ShopTalk
from conversations.shops.world import Shop
from conversations.toolset import INTEGER, Function, Toolset, may, needs
from conversations.words import say

ERRANDS = (*ORDER_ERRANDS, *QUESTION_ERRANDS)
GREETED = 0.08  # of the conversations begin with hello alone
MAX_MESSAGES = 20
ORDER = needs("order|order_number|order_id|number", "The number of the order.|Which order, by its number.")
FUNCTIONS = {
    "order": Function(
        "get_order|lookup_order|find_order|order_details|show_order",
        "An order with its items, status and dates.|Everything about an order.|Look an order up by its number.",
        {"order": ORDER},
    ),
    "track": Function(
        "track_parcel|track|parcel_status|where_is_parcel|get_tracking",
        "Where a parcel is and when it comes.|The last scan of a parcel and the expected day.",
        {"tracking": needs("tracking|tracking_number|parcel|code", "The tracking number.|The number of the parcel.")},
    ),
    "cancel": Function(
        "cancel_order|stop_order|cancel",
        "Cancel an order that has not been sent.|Stop an order and refund it.",
        {"order": ORDER},
    ),
    "return": Function(
        "create_return|open_return|start_return|new_return",
        "Open a return. Returns its number.|Start a return and send a label.",
        {
            "order": ORDER,
            "item": needs("item|item_number|sku|article", "The number of the item."),
            "reason": may("reason|why|note", "Why it comes back."),
        },
    ),
    "address": Function(
        "change_address|update_address|set_address|new_address",
        "Change where an order goes that has not been sent.|Give an order another address.",
        {
            "order": ORDER,
            "street": needs("street|street_line|line1", "Number and street."),
            "town": needs("town|city|place", "The town."),
            "postcode": needs("postcode|zip|postal_code", "The postcode."),
        },
    ),
    "claim": Function(
        "open_claim|create_claim|report_problem|file_complaint|new_case",
        "Report something broken, wrong or missing.|Open a case about an item.",
        {
            "order": ORDER,
            "item": needs("item|item_number|sku|article", "The number of the item."),
            "problem": needs("problem|description|what|details", "What is wrong."),
        },
    ),
    "search": Function(
        "search_items|find_items|search_catalogue|search_products|catalogue",
        "Things for sale whose name fits, with price and stock.|Search what the shop sells.",
        {
            "text": needs("text|query|words|name", "A part of the name.|What to look for."),
            "most": may("limit|at_most|max_results", "How many results at most.", INTEGER),
        },
    ),
    "person": Function(
        "hand_over|transfer|call_colleague|escalate|forward_chat",
        "Hand the chat over to a colleague.|Ask a person to take over.",
        {"summary": needs("summary|note|reason|about", "What it is about.|What the colleague should know.")},
    ),
}
ROLES = (
    "You are the [support|service] agent of {name}, a shop for {theme}.",
    "You answer the customers of {name}, who [buy|order] {theme} [online|from us].",
    "You work in the [chat|customer service] of {name} ({theme}).",
    "{name} sells {theme}. You help its customers [by chat|in the chat].",
)
RULES = {
    "return": "Things can be [returned|sent back] within {return_days} days of delivery.",
    "refund": "Refunds [arrive|are paid] within {refund_days} days.",
    "change": "An order can be cancelled or changed until it is shipped.",
    "person": "Hand over to a colleague if the customer asks for a person.",
    "shipping": "Shipping costs {shipping} and is free from {free_from}.",
    "delivery": "A parcel takes {delivery} working days.",
    "warranty": "The warranty is {warranty}.",
    "hours": "Our shop is open from {opens}:00 to {closes}:00[, Monday to Saturday|].",
    "phone": "The phone number of the shop is {phone}.",
    "today": "Today is {today}.",
    "ask": "Ask before you [change|cancel or change] anything.",
    "style": "Be [brief|polite|friendly|exact].",
    "look": "Look the order up before you talk about it.",
    "promise": "[Never promise|Do not promise] what you do not know.",
    "plain": "[Use|Write] plain sentences.",
}
KEPT = ("return", "refund", "change", "person")  # the rules that errands rest on


def system(rng: Random, shop: Shop) -> str:
    """Who the agent is, and the rules in any order, which the shop is told."""
    others = [rule for rule in RULES if rule not in KEPT]
    shop.rules = [*KEPT, *rng.sample(others, rng.randrange(3, len(others) + 1))]
    rng.shuffle(shop.rules)
    texts = [RULES[rule] for rule in shop.rules]
    joined = "\n".join(f"- {text}" for text in texts) if rng.random() < 0.4 else " ".join(texts)
    opening = rng.choice(ROLES) + rng.choice((" ", "\n", "\n\n"))
    return say(rng, (opening + joined,), **shop.facts())


def conversation(rng: Random, name: str) -> Script:
    """One conversation of one to three errands."""
    shop = Shop(rng)
    toolset = Toolset(rng, FUNCTIONS)
    script = Script(name, system(rng, shop), toolset.tools)
    talk = ShopTalk(rng, script, toolset, shop)
    if rng.random() < GREETED:
        greet(talk)
    for errand in rng.sample(ERRANDS, rng.choice((1, 1, 2, 2, 3))):
        before = list(script.messages)
        errand(talk)
        if len(script.messages) > MAX_MESSAGES:
            script.messages = before
            break
        if talk.over:
            return script
    if rng.random() < 0.4 and len(script.messages) <= MAX_MESSAGES - 2:
        talk.user("[No, that's all|That was all][, thank you|, thanks|. Thanks for your help|].", "Thanks[, bye|]!")
        first = f", {shop.first}" if talk.named else ""
        talk.say("You're welcome{first}. [Have a nice day|Take care|Goodbye]!", first=first)
    return script
