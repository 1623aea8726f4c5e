"""What customers ask an invented shop without having ordered: goods, rules, and what nobody knows."""

from __future__ import annotations

from collections.abc import Callable

from conversations import words
from conversations.shops.talk import ShopTalk
from conversations.words import plural

Errand = Callable[[ShopTalk], None]
HELLOS = ("", "", "", "[Hi|Hello|Good morning]. ", "[Hi|Hello]! ", "One question: ", "Sorry to bother you. ")


QUESTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (  # the rule that it is about, the question, the answers
    (
        "return",
        "[How long can I send things back|How many days do I have for a return|Until when can I return something]?",
        ("You have {return_days} days from the delivery.", "{return_days} days, counted from the delivery."),
    ),
    (
        "refund",
        "[When do I get my money back|How long does a refund take]?",
        ("Refunds are paid within {refund_days} days.", "It takes up to {refund_days} days."),
    ),
    (
        "change",
        "[Until when can I cancel an order|Can I still change an order]?",
        ("Until it is shipped.", "An order can be changed until it is shipped."),
    ),
    (
        "shipping",
        "[What does shipping cost|How much is the delivery|Is shipping free]?",
        ("Shipping costs {shipping} and is free from {free_from}.",),
    ),
    (
        "shipping",
        "From which amount is shipping free?",
        ("It is free from {free_from}.", "From {free_from}. Below that it costs {shipping}."),
    ),
    (
        "delivery",
        "How [long does a parcel take|fast do you deliver]?",
        ("A parcel takes {delivery} working days.", "It takes {delivery} working days."),
    ),
    ("warranty", "How long is the warranty?", ("The warranty is {warranty}.", "{warranty}, from the delivery.")),
    (
        "hours",
        "[When are you open|What are your opening hours]?",
        ("We are open from {opens}:00 to {closes}:00.", "From {opens}:00 to {closes}:00."),
    ),
    (
        "hours",
        "[When do you close|Until when is the shop open]?",
        ("The shop closes at {closes}:00.", "At {closes}:00."),
    ),
    ("hours", "When do you open?", ("At {opens}:00.", "The shop opens at {opens}:00.")),
    (
        "phone",
        "[What is your phone number|Can I call you|Which number can I call]?",
        ("The number is {phone}.", "You can call {phone}."),
    ),
    ("today", "What day is it today?", ("Today is {today}.",)),
)


def browse(talk: ShopTalk) -> None:
    """Whether there is something, what it costs, which is the cheapest."""
    shop, rng = talk.shop, talk.rng
    item = rng.choice(shop.items)
    word = item.name.split(" ", 1)[1]
    fit = [other for other in shop.items if word in other.name]
    talk.user(
        rng.choice(HELLOS) + "[Do you have|Do you sell] the {name}?",
        rng.choice(HELLOS) + "What does the {name} cost?",
        rng.choice(HELLOS) + "Is the {name} in stock?",
        name=item.name,
    )
    talk.call("search", {"found": [shop.on_sale(other) for other in fit]}, text=word)
    price = shop.money(item.cents)
    if item.stock == 0:
        talk.answer(
            "The {name} costs {price}, but it is sold out at the moment.",
            "We do have it, for {price}, but it is sold out now.",
            name=item.name,
            price=price,
        )
        return
    talk.answer(
        "The {name} costs {price}, and {stock} in stock.",
        "Yes, the {name} is there for {price}; {stock} in stock.",
        name=item.name,
        price=price,
        stock=f"{item.stock} {'is' if item.stock == 1 else 'are'}",
    )
    if item.stock > 1 and rng.random() < 0.4:
        count = rng.choice((2, 3))
        talk.user("And how much are {count}?", "What would {count} of them cost?", count=count)
        talk.answer(
            "{count} of them cost {total}.",
            "{count} times {price} is {total}.",
            count=count,
            price=price,
            total=shop.money(item.cents * count),
        )


def nothing_found(talk: ShopTalk) -> None:
    """Something that the shop does not sell."""
    word = talk.rng.choice(
        ("surfboard", "wedding dress", "tractor", "piano", "telescope", "canoe", "typewriter", "parachute")
    )
    talk.user("Do you sell a {word}?", "I'm looking for a {word}.", word=word)
    talk.call("search", {"found": []}, text=word)
    talk.answer("I'm sorry, we have no {word}.", "No, I found no {word} in the shop, I'm sorry.", word=word)


def rule(talk: ShopTalk) -> None:
    """What the shop's rules say, or that they say nothing about it."""
    shop, rng = talk.shop, talk.rng
    about, asked, answers = rng.choice(QUESTIONS)
    talk.user(rng.choice(HELLOS) + asked)
    if about in shop.rules:
        talk.answer(*answers, **shop.facts())
    else:
        talk.answer(
            "I'm sorry, I don't know that.", "I can't tell you that, I'm sorry. [A colleague may know it|I don't know]."
        )


def unknown(talk: ShopTalk) -> None:
    """What neither the rules nor the functions know."""
    talk.user(
        "[Who founded the shop|How many people work for you|Is your boss nice|What will be new next year]?",
        "[Do you have jobs|Can I get a discount|Where are your things made|Do you plan a shop in {town}]?",
        town=words.town(talk.rng),
    )
    talk.answer(
        "I'm sorry, I don't know that.", "I can't tell you that, I'm sorry: I only know about orders and our goods."
    )


def person(talk: ShopTalk) -> None:
    """The customer wants a person, who takes over."""
    rng = talk.rng
    about = rng.choice(("an invoice", "a repair", "a large order", "a complaint", "a gift card", "a business account"))
    talk.user(
        "[I want to|Can I] [talk|speak] to a [person|human][ about {about}|. It is about {about}]."
        if rng.random() < 0.5
        else "Give me a real person, please. It's about {about}.",
        about=about,
    )
    minutes = rng.randrange(1, 20)
    talk.call(
        "person", {"ok": True, "waiting_minutes": minutes}, summary=f"The customer asks for a person about {about}."
    )
    talk.say(
        "A colleague will take over in about {minutes}. Please stay in the chat.", minutes=plural(minutes, "minute")
    )
    talk.over = True


QUESTION_ERRANDS: tuple[Errand, ...] = (browse, nothing_found, rule, rule, unknown, person)
