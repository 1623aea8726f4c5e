"""Deeds that find something out: weather, time, words, money, shares, ways, recipes."""

from __future__ import annotations

from random import Random

from conversations import words
from conversations.everyday.deed import Deed, Fields, city, time
from conversations.toolset import NUMBER, Function, needs

WEATHER = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "snowy", "stormy", "dry", "mild")
LANGUAGES = {
    "French": "bonjour|merci|maison|chat|pain|livre|eau|soleil",
    "Spanish": "hola|gracias|casa|gato|pan|libro|agua|sol",
    "German": "hallo|danke|Haus|Katze|Brot|Buch|Wasser|Sonne",
    "Italian": "ciao|grazie|casa|gatto|pane|libro|acqua|sole",
}
ENGLISH = ("hello", "thank you", "house", "cat", "bread", "book", "water", "sun")
DISHES = ("soup", "pancakes", "risotto", "lasagne", "curry", "apple pie", "salad", "goulash", "noodles", "quiche")


def weather(rng: Random) -> Fields:
    """What it is like somewhere."""
    sky = rng.choice(WEATHER)
    return {
        "place": city(rng),
        "weather": sky,
        "degrees": rng.randrange(-9, 2) if sky == "snowy" else rng.randrange(3, 36),
    }


def translation(rng: Random) -> Fields:
    """A word and the same in another language."""
    language, index = rng.choice(list(LANGUAGES)), rng.randrange(len(ENGLISH))
    return {"text": ENGLISH[index], "language": language, "translation": LANGUAGES[language].split("|")[index]}


def money(rng: Random) -> Fields:
    """An amount in one currency, and what it is in another."""
    source, target = rng.sample(("EUR", "USD", "GBP", "JPY", "CHF", "SEK", "PLN", "CAD"), 2)
    return {
        "amount": rng.randrange(5, 900),
        "source": source,
        "target": target,
        "result": rng.randrange(500, 99999) / 100,
    }


def sum_of(rng: Random) -> Fields:
    """A term and its value."""
    first, second, sign = rng.randrange(2, 999), rng.randrange(2, 99), rng.choice("+-*")
    result = {"+": first + second, "-": first - second, "*": first * second}[sign]
    return {"term": f"{first} {sign} {second}", "result": result}


KNOWLEDGE: tuple[Deed, ...] = (
    Deed(
        Function(
            "get_weather|weather|current_weather|weather_in|get_current_weather|check_weather",
            "The weather of a place.|Get the current weather in a city.|Weather and temperature.",
            {"place": needs("city|place|location|town", "The name of the city.|Which place.|City, e.g. Paris")},
        ),
        weather,
        ("weather", "degrees"),
        (
            "[What's|What is|How is] the weather [like |]in {place}[ today| now|]?",
            "[Is it cold|How warm is it|Do I need a coat] in {place}?",
            "[Tell me the weather|Weather] in {place}[, please|].",
        ),
        ("It is {weather} in {place}, at {degrees} degrees.", "In {place} it is {weather} and {degrees} degrees."),
        "[What's the weather like|How is the weather|Is it cold outside]?",
        "[For which place|Where are you|Which city]?",
        "place",
    ),
    Deed(
        Function(
            "get_time|current_time|time_in|local_time",
            "What time it is in a city.|The local time of a place.",
            {"place": needs("city|place|location", "The city.|Where.")},
        ),
        lambda rng: {"place": city(rng), "time": time(rng)},
        ("time",),
        ("What time is it in {place}?", "What is the time in {place}?"),
        ("It is {time} in {place}.", "{time}."),
        "What time is it?",
        "[In which city|Where]?",
        "place",
    ),
    Deed(
        Function(
            "translate|translate_text|get_translation",
            "Translate a text.|A text in another language.",
            {
                "text": needs("text|phrase|word", "What is translated."),
                "language": needs("language|target_language|to", "Into which language."),
            },
        ),
        translation,
        ("translation",),
        (
            'Translate "{text}" into {language}[, please|].',
            'What is "{text}" in {language}?',
            "How do you say {text} in {language}?",
        ),
        ("In {language}: {translation}.", '"{text}" is {translation} in {language}.'),
    ),
    Deed(
        Function(
            "convert_currency|exchange|currency|convert_money",
            "Convert an amount of money.|Exchange rates.",
            {
                "amount": needs("amount|value|sum", "How much.", NUMBER),
                "source": needs("from|source|from_currency", "Such as EUR."),
                "target": needs("to|target|to_currency", "Such as USD."),
            },
        ),
        money,
        ("result",),
        (
            "[How much|What] is {amount} {source} in {target}?",
            "[Convert|Change] {amount} {source} [to|into] {target}[, please|].",
        ),
        ("{amount} {source} [are|is] {result} {target}.", "That is {result} {target}."),
    ),
    Deed(
        Function(
            "calculate|calculator|evaluate|compute",
            "Work out a term.|Evaluate an expression.",
            {"term": needs("expression|term|input", "Such as 3 * 4.")},
        ),
        sum_of,
        ("result",),
        ("What is {term}?", "[Calculate|Compute|Work out] {term}[, please|].", "{term}?"),
        ("{term} = {result}.", "{result}.", "It is {result}."),
        "[Can you calculate something|I need a calculator].",
        "[Of course|Gladly], what is it?",
        "term",
    ),
    Deed(
        Function(
            "stock_price|get_quote|share_price|get_stock_price",
            "The price of a share.|Look a share up.",
            {"company": needs("company|symbol|ticker|name", "The name or symbol.")},
        ),
        lambda rng: {
            "company": rng.choice((words.family_name(rng), words.code(rng, "AAA"), words.code(rng, "AAAA"))),
            "price": rng.randrange(200, 90000) / 100,
            "currency": rng.choice(("EUR", "USD", "GBP")),
        },
        ("price", "currency"),
        (
            "[What is the price of|How much is|How is] {company}?",
            "[Look up|Get me] the share price of {company}.",
            "What does a share of {company} cost?",
        ),
        ("{company} is at {price} {currency}.", "A share of {company} costs {price} {currency}."),
        "[What's the share price?|Look up a share, please.]",
        "Of which company?",
        "company",
    ),
    Deed(
        Function(
            "distance|get_distance|route|how_far|directions",
            "How far it is between two places.|The way from one place to another.",
            {
                "start": needs("from|start|origin", "Where it begins."),
                "end": needs("to|end|destination", "Where it ends."),
            },
        ),
        lambda rng: {"start": city(rng), "end": city(rng), "km": rng.randrange(5, 1900), "hours": rng.randrange(1, 20)},
        ("km", "hours"),
        (
            "How far is it from {start} to {end}?",
            "What is the distance between {start} and {end}?",
            "How long does it take from {start} to {end}?",
        ),
        ("It is {km} km from {start} to {end}, about {hours} hours.", "{km} km; it takes about {hours} hours."),
    ),
    Deed(
        Function(
            "find_recipe|recipe|search_recipes|get_recipe",
            "A recipe for a dish.|Recipes.",
            {"dish": needs("dish|query|name|food", "What is cooked.")},
        ),
        lambda rng: {
            "dish": rng.choice(DISHES),
            "title": f"{words.given_name(rng)}'s {rng.choice(('quick', 'best', 'easy', 'simple'))} recipe",
            "minutes": rng.randrange(10, 120),
            "needs": rng.sample(
                ("eggs", "flour", "onions", "butter", "rice", "carrots", "cheese", "apples", "cream"), 3
            ),
        },
        ("title", "minutes", "needs"),
        ("[I want to cook|Find a recipe for|I need a recipe for] {dish}.", "How do I make {dish}?"),
        (
            "{title} for {dish} takes {minutes} minutes and needs {needs[0]}, {needs[1]} and {needs[2]}.",
            "I found {title}: {minutes} minutes, with {needs[0]}, {needs[1]} and {needs[2]}.",
        ),
        "[I want to cook something|Find a recipe].",
        "What would you like to [cook|make]?",
        "dish",
    ),
    Deed(
        Function(
            "search_web|web_search|search|look_up",
            "Search the web.|Look something up.",
            {"query": needs("query|q|text|words", "What to look for.")},
        ),
        lambda rng: {
            "query": rng.choice(
                (
                    f"opening hours {words.town(rng)} museum",
                    f"{words.family_name(rng)} bakery",
                    f"{city(rng)} marathon",
                    f"ferry to {words.town(rng)}",
                    f"{words.town(rng)} library",
                )
            ),
            "title": words.say(
                rng,
                ("Open from {h} to {k}", "Closed on {d}", "Starts at {h}:00 on {d}", "Daily, {h}:00 to {k}:00"),
                h=rng.randrange(7, 12),
                k=rng.randrange(13, 21),
                d=rng.choice(words.WEEKDAYS),
            ),
        },
        ("title",),
        ("[Search for|Look up|Find] {query}[, please|].", "What can you find about {query}?"),
        ("I found this: {title}.", "{title}, it says."),
        "[Search the web|Look something up] for me.",
        "What [are you looking for|shall I search for]?",
        "query",
    ),
)
