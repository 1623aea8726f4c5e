"""Questions about a table that is drawn: rows by a filter, sums and counts, comparisons and differences.

Must not know: other domains.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from examples_text.script import Script, function

from conversations import words
from conversations.words import listed, plural, say


@dataclass(frozen=True)
class Kind:
    """A kind of table: its name, what a row is, the column of groups with its values, the number and its unit."""

    table: str
    row: str
    group: str
    values: tuple[str, ...]
    number: str
    unit: str
    low: int
    high: int


KINDS = (
    Kind("sales", "sale", "region", ("north", "south", "east", "west", "centre"), "amount", "euros", 20, 900),
    Kind("trips", "trip", "vehicle", ("van", "bus", "truck", "car", "bicycle"), "distance", "km", 3, 420),
    Kind("harvest", "delivery", "crop", ("apples", "pears", "plums", "grapes", "hops"), "weight", "kg", 15, 800),
    Kind("tickets", "ticket", "team", ("billing", "network", "hardware", "accounts"), "minutes", "minutes", 4, 180),
    Kind("loans", "loan", "branch", ("harbour", "park", "station", "hill"), "days", "days", 1, 40),
    Kind("readings", "reading", "sensor", ("cellar", "roof", "garden", "hall"), "rain", "mm", 0, 60),
    Kind("expenses", "expense", "category", ("travel", "food", "rent", "books", "tools"), "amount", "euros", 5, 600),
    Kind("runs", "run", "club", ("foxes", "herons", "otters", "badgers"), "seconds", "seconds", 700, 4200),
)
SYSTEMS = (
    "You answer questions about [the|a] table {table}. [Use the functions|Ask the table], [never guess a number|do not "
    "guess]. [Keep it short|One sentence is enough].",
    "[Data assistant|You are a data assistant] of {name} in {place}. The table is {table}: one row for each {row}, "
    "with {columns}. [Numbers with their unit|Always give the unit].",
    "You [look things up|read] in {table} for people who do not know how to query. [Say the number first|Plain "
    "answers].",
)
ASKS = {
    "sum": ("What is the total {number} of {value}?", "How many {unit} does {value} have in all?"),
    "mean": ("What is the mean {number} of {value}?", "How [high|large] is the average {number} for {value}?"),
    "max": ("What is the highest {number} of {value}?", "The largest {number} for {value}, please."),
    "min": ("What is the lowest {number} of {value}?", "And the smallest {number} for {value}?"),
    "count": ("How many {row}s are there for {value}?", "Count the {row}s of {value}[, please|]."),
}
SAYS = {
    "sum": ("{value} has {result} {unit} in all.", "The total is {result} {unit}, from {rows}."),
    "mean": ("The mean is {result} {unit}, over {rows}.", "On average {result} {unit}."),
    "max": ("The highest {number} of {value} is {result} {unit}.", "{result} {unit}."),
    "min": ("The lowest {number} of {value} is {result} {unit}.", "{result} {unit}."),
    "count": ("There are {result}.", "{value} has {rows}."),
}
AGAIN = ("And {value}?", "[The same|And the same] for {value}[, please|].", "What about {value}?")
COMPARES = ("Which [of the two|one] is higher, and by how much?", "[How large is|What is] the difference?")
COMPARED = (
    "{more} is higher, by {difference} {unit}: {high} against {low}.",
    "The difference is {difference} {unit}. {more} has {high}, {less} has {low}.",
)
EQUAL = "They are equal: {high} {unit} each."
ROWS = (
    "[Show me|List|Give me] the {row}s of {value} with {number} above {bound}.",
    "Which {row}s of {value} have more than {bound} {unit}?",
)
FOUND = ("{rows}: {named}.", "I found {rows}: {named}.")
NONE = ("There is none.", "No {row} of {value} is above {bound} {unit}.")
TOPS = ("Which [one|of them] is the largest?", "And the largest of these?")
TOP = ("{id}, with {result} {unit}.", "The largest is {id} ({result} {unit}).")
UNKNOWN = ("There is no {group} {wrong}. The table has {known}.", "I find no {wrong}; {group} can be {known}.")
FIXES = ("[Oh, I meant|Then] {value}.", "{value}, [sorry|please].", "[Take|Use] {value}[ then|].")


def _tools(rng: Random, kind: Kind) -> list[dict[str, Any]]:
    """`aggregate` and `rows`, under names of their own."""
    group = {"type": "string", "enum": list(kind.values)}
    how = {"type": "string", "enum": list(ASKS)}
    table = f"The name of the table, such as {kind.table}."
    tools = [
        function(
            rng.choice(("aggregate", "summarize", "compute", "table_stats")),
            "One number from the rows of a group.",
            {
                "table": table,
                "column": f"The column with numbers: {kind.number}.",
                "how": how,
                kind.group: f"Only this {kind.group}.",
            },
        ),
        function(
            rng.choice(("rows", "query_rows", "filter_rows", "select")),
            "The rows of a group with a number above a bound.",
            {"table": table, kind.group: group, "above": {"type": "integer", "description": "The bound."}},
        ),
    ]
    return tools


class Talk:
    """A table and what is asked about it."""

    def __init__(self, rng: Random, name: str) -> None:
        self.rng, self.kind = rng, rng.choice(KINDS)
        kind = self.kind
        self.values = rng.sample(kind.values, rng.randrange(3, len(kind.values) + 1))
        self.data = {
            value: {
                words.code(rng, rng.choice(("A-999", "R9999", "99-AA"))): rng.randrange(kind.low, kind.high)
                for _ in range(rng.randrange(3, 8))
            }
            for value in self.values
        }
        tools = _tools(rng, kind)
        self.aggregate, self.rows = (tool["function"]["name"] for tool in tools)
        columns = listed(["id", kind.group, kind.number])
        known = {"name": words.given_name(rng), "place": words.town(rng), "columns": columns}
        system = say(rng, SYSTEMS, table=kind.table, row=kind.row, **known)
        self.script = Script(name, system, rng.sample(tools, len(tools)))
        self.words = {"row": kind.row, "number": kind.number, "unit": kind.unit, "group": kind.group}

    def number(self, value: str, how: str) -> float:
        """What the table has, rounded to one digit."""
        numbers = list(self.data[value].values())
        if how == "count":
            return len(numbers)
        found = {"sum": sum(numbers), "max": max(numbers), "min": min(numbers), "mean": sum(numbers) / len(numbers)}[
            how
        ]
        return round(found, 1)

    def ask(self, value: str, how: str, texts: tuple[str, ...]) -> float:
        """One number, asked for and told."""
        rng, kind, script = self.rng, self.kind, self.script
        script.user(say(rng, texts, value=value, **self.words))
        result, count = self.number(value, how), len(self.data[value])
        arguments = {"table": kind.table, "column": kind.number, "how": how, kind.group: value}
        script.call(None, (self.aggregate, arguments, {"result": result, "rows": count}))
        script.say(
            say(rng, SAYS[how], value=value.capitalize(), result=result, rows=plural(count, "row"), **self.words)
        )
        return result

    def compare(self) -> None:
        """The same number of two groups, and the difference."""
        first, second = self.rng.sample(self.values, 2)
        how = self.rng.choice(list(ASKS))
        one, other = self.ask(first, how, ASKS[how]), self.ask(second, how, AGAIN)
        self.script.user(say(self.rng, COMPARES))
        (low, less), (high, more) = sorted(((one, first), (other, second)))
        unit = self.kind.unit if how != "count" else f"{self.kind.row}s"
        told = {"high": high, "low": low, "unit": unit, "more": more.capitalize(), "less": less}
        texts = (EQUAL,) if high == low else COMPARED
        self.script.say(say(self.rng, texts, difference=round(high - low, 1), **told))

    def filter(self) -> None:
        """Rows above a bound, and the largest of them."""
        rng, kind, script = self.rng, self.kind, self.script
        value = rng.choice(self.values)
        numbers = sorted(self.data[value].values())
        bound = numbers[-min(len(numbers), rng.randrange(1, 5))] - rng.choice((-1, 1, 1, 2))
        script.user(say(rng, ROWS, value=value, bound=bound, **self.words))
        found = {key: number for key, number in self.data[value].items() if number > bound}
        rows = [{"id": key, kind.number: number} for key, number in found.items()]
        script.call(None, (self.rows, {"table": kind.table, kind.group: value, "above": bound}, {"rows": rows}))
        if not found:
            script.say(say(rng, NONE, value=value, bound=bound, **self.words))
            return
        named = listed([f"{key} ({number} {kind.unit})" for key, number in found.items()])
        script.say(say(rng, FOUND, rows=plural(len(found), "row"), named=named))
        if len(found) > 1 and rng.random() < 0.6:
            best = max(found, key=lambda key: found[key])
            script.user(say(rng, TOPS))
            script.say(say(rng, TOP, id=best, result=found[best], unit=kind.unit))

    def miss(self) -> None:
        """A group that is not there, then one that is."""
        rng, kind = self.rng, self.kind
        wrong, how = words.town(rng), rng.choice(list(ASKS))
        self.script.user(say(rng, ASKS[how], value=wrong, **self.words))
        arguments = {"table": kind.table, "column": kind.number, "how": how, kind.group: wrong}
        error = {"error": f"no {kind.group} {wrong}", "known": self.values}
        self.script.call(None, (self.aggregate, arguments, error))
        self.script.say(say(rng, UNKNOWN, group=kind.group, wrong=wrong, known=listed(self.values, "or")))
        self.ask(rng.choice(self.values), how, FIXES)


def conversation(rng: Random, name: str) -> Script:
    """One or two questions about one table."""
    talk = Talk(rng, name)
    for ask in rng.sample((talk.compare, talk.filter, talk.miss), rng.randrange(1, 3)):
        ask()
    return talk.script
