"""What customers of an invented shop want of their orders; the rules decide, and the functions know."""

from __future__ import annotations

from datetime import timedelta

from conversations import words
from conversations.shops.questions import Errand
from conversations.shops.talk import NO, YES, ShopTalk
from conversations.words import plural

MOODS = (
    "",
    "",
    "",
    "[Hi|Hello|Good morning]. ",
    "[Hi|Hello]! ",
    "This is annoying. ",
    "I'm in a hurry. ",
    "Sorry to bother you. ",
)
FAULTS = (
    "it is cracked",
    "a part is missing",
    "it does not work",
    "it has a scratch",
    "it is the wrong colour",
    "it came bent",
    "it makes a strange noise",
    "the box was open and it is dirty",
    "one screw is loose",
    "it smells of glue",
)
REASONS = (
    "too small",
    "too large",
    "not needed any more",
    "not as expected",
    "bought twice",
    "a gift that nobody wants",
)


def where(talk: ShopTalk) -> None:
    """Where an order is."""
    shop, rng = talk.shop, talk.rng
    status = rng.choice(("processing", "shipped", "shipped", "delivered"))
    order = shop.order(status, rng.randrange(1, 9) if status == "delivered" else None)
    talk.open_order(
        order,
        rng.choice(MOODS) + "[Where is my parcel|When does my order come|Has my {thing} been sent]?",
        rng.choice(MOODS) + "[I'm waiting for|I still don't have] my {thing}.",
        thing=order.item.name,
    )
    if status == "processing":
        talk.answer("Order {n} is still being [prepared|processed] and has not been sent yet.", n=order.number)
    elif status == "delivered":
        talk.answer(
            "Order {n} was delivered on {day}.",
            "It was delivered on {day}, to {address}.",
            n=order.number,
            day=order.delivered,
            address=f"{shop.address['street']}, {shop.address['town']}",
        )
        talk.user("[Oh|Ah], my neighbour has it. [Thanks|Sorry].", "I'll ask next door, then.")
        talk.answer("[Good|All right].", "[No problem|Good to hear].")
    else:
        place, due = words.town(rng), shop.today + timedelta(days=rng.randrange(1, 5))
        late = rng.random() < 0.3
        result = {"status": "delayed" if late else "on its way", "last_scan": place, "expected": str(due)}
        talk.call("track", result, tracking=order.tracking)
        talk.answer(
            "[Your parcel|It] was last scanned in {place} and [should come|is expected] on {due}.",
            "[Your parcel|It] is {status}: the last scan was in {place}, and it should be with you on {due}.",
            place=place,
            due=due,
            status=result["status"],
        )


def cancel(talk: ShopTalk) -> None:
    """Stop an order, if it has not been sent."""
    shop, rng = talk.shop, talk.rng
    status = rng.choice(("processing", "processing", "shipped"))
    order = shop.order(status)
    talk.open_order(
        order,
        rng.choice(MOODS) + "[I want to cancel my order.|Please cancel my order.|Can you stop my order?]",
        rng.choice(MOODS) + "I don't want the {thing} any more. [Cancel it|Please cancel it].",
        thing=order.item.name,
    )
    if status == "shipped":
        talk.answer(
            "I'm sorry, {first}, order {n} has been shipped and can't be cancelled any more. You can send it back "
            "within {days} days of delivery.",
            first=shop.first,
            n=order.number,
            days=shop.return_days,
        )
        return
    total = shop.money(order.cents)
    talk.say(
        "Order {n} has not been sent yet. I would cancel it and refund {total}. [Shall I|Is that right]?",
        "I can still cancel order {n}; you get {total} back. Shall I do that?",
        n=order.number,
        total=total,
    )
    if rng.random() < 0.2:
        talk.user(*NO)
        talk.answer("[All right|OK], order {n} stays as it is.", n=order.number)
        return
    talk.user(*YES)
    talk.call("cancel", {"order": order.number, "status": "cancelled", "refund": total}, order=order.number)
    talk.answer(
        "[Done|It's done]: order {n} is cancelled, and {total} come back to you within {days} days.",
        "Order {n} is cancelled. The {total} arrive within {days} days.",
        n=order.number,
        total=total,
        days=shop.refund_days,
    )


def send_back(talk: ShopTalk) -> None:
    """A return, in time or too late by the shop's rule."""
    shop, rng = talk.shop, talk.rng
    late = rng.random() < 0.35
    days = shop.return_days + rng.randrange(1, 60) if late else rng.randrange(1, shop.return_days)
    order, why = shop.order("delivered", days), rng.choice(REASONS)
    name = order.item.name
    talk.open_order(
        order,
        rng.choice(MOODS)
        + "[I'd like to|Can I|I want to] [return|send back] the {name}[. It is {why}.|: it is {why}.|, it is {why}.]",
        rng.choice(MOODS) + "The {name} is {why}. [Can I send it back?|I'd like to return it.]",
        name=name,
        why=why,
    )
    if late:
        talk.answer(
            "I'm sorry, {first}. The {name} came {days} days ago, and returns are possible for {limit} days.",
            "That was {days} days ago, {first}, and we take things back for {limit} days, so I can't open a return.",
            first=shop.first,
            name=name,
            days=days,
            limit=shop.return_days,
        )
        return
    total = shop.money(order.cents)
    talk.say(
        "The {name} came {days} days ago, so it can go back. You would get {total}. Shall I open the return?",
        "Yes, {days} days of {limit} have passed. I would open a return for the {name}, and you get {total}. All "
        "right?",
        name=name,
        days=days,
        limit=shop.return_days,
        total=total,
    )
    talk.user(*YES)
    number = words.code(rng, rng.choice(("RT-9999", "8999", "RM-99999", "R-8999")))
    talk.call(
        "return", {"return": number, "label": "sent by e-mail"}, order=order.number, item=order.item.number, reason=why
    )
    talk.answer(
        "Return {number} is open, and the label comes by e-mail.",
        "Done: the return has the number {number}. You get the "
        "label by e-mail[, and {total} within {days} days of arrival|].",
        number=number,
        total=total,
        days=shop.refund_days,
    )


def move_house(talk: ShopTalk) -> None:
    """Another address, if the order has not been sent."""
    shop, rng = talk.shop, talk.rng
    order = shop.order(rng.choice(("processing", "processing", "shipped")))
    new = words.address(rng)
    said = f"{new['street']}, {new['town']}, {new['postcode']}"
    talk.open_order(
        order,
        rng.choice(MOODS) + "[I've moved|I gave the wrong address]. Can my order go somewhere else?",
        rng.choice(MOODS) + "[Please change|I need to change] the address of my order.",
    )
    if order.status == "shipped":
        talk.answer("I'm sorry, order {n} has been shipped, so the address can't be changed any more.", n=order.number)
        return
    talk.say("Order {n} has not been sent yet. [Where should it go|What is the new address]?", n=order.number)
    talk.user("{said}", "To {said}.", "{said}, please.", said=said)
    talk.say(
        "Then order {n} goes to {said}. Is that right?",
        "I would send order {n} to {said}. Shall I?",
        n=order.number,
        said=said,
    )
    talk.user(*YES)
    talk.call("address", {"order": order.number, "address": said}, order=order.number, **new)
    talk.answer("[Done|Changed]: order {n} goes to {said} now.", n=order.number, said=said)


def broken(talk: ShopTalk) -> None:
    """Something that is not right."""
    shop, rng = talk.shop, talk.rng
    order, fault = shop.order("delivered", rng.randrange(1, 30)), rng.choice(FAULTS)
    name, told = order.item.name, rng.random() < 0.7
    if told:
        talk.open_order(
            order, rng.choice(MOODS) + "There's a problem with the {name}: {fault}.", name=name, fault=fault
        )
    else:
        talk.open_order(
            order, rng.choice(MOODS) + "[Something is wrong with|I have a complaint about] the {name}.", name=name
        )
        talk.say("I'm sorry to hear that, {first}. What exactly is wrong with the {name}?", first=shop.first, name=name)
        talk.user("{fault}.", fault=fault[0].upper() + fault[1:])
    sorry = "I'm sorry about that, {first}. " if told else ""
    talk.say(
        sorry + "Shall I report this for order {n}: {fault}?",
        sorry + "I can open a case for the {name} ({fault}). Shall I?",
        first=shop.first,
        n=order.number,
        fault=fault,
        name=name,
    )
    talk.user(*YES)
    number = words.code(rng, rng.choice(("C-9999", "NR-899", "89999", "K99999")))
    due = rng.randrange(1, 6)
    talk.call(
        "claim", {"case": number, "answer_within_days": due}, order=order.number, item=order.item.number, problem=fault
    )
    talk.answer(
        "Case {number} is open. You get an answer within {due}.",
        "[Thank you|Done]. It is case {number}, and we answer within {due}.",
        number=number,
        due=plural(due, "day"),
    )


def content(talk: ShopTalk) -> None:
    """What an order is about."""
    shop = talk.shop
    order = shop.order(talk.rng.choice(("processing", "shipped")))
    talk.open_order(
        order, "[What did I order|What is in my order] again?", "[How much is|What is the total of] my order?"
    )
    items = f"{order.count} x {order.item.name}"
    talk.answer(
        "Order {n} is {items}, {total} in all.",
        "It is {items} for {total}, ordered on {day}.",
        n=order.number,
        items=items,
        total=shop.money(order.cents),
        day=order.placed,
    )


ORDER_ERRANDS: tuple[Errand, ...] = (where, cancel, send_back, move_house, broken, content)
