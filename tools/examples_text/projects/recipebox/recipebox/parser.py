"""Reading the lines of a recipe."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from recipebox.units import canonical

AMOUNT = re.compile(r"^(\d+/\d+|\d+(?:\.\d+)?)\s*")


@dataclass(frozen=True)
class Ingredient:
    """So much of something; unit is None for things that are counted."""

    name: str
    amount: Fraction
    unit: str | None = None

    def scaled(self, factor: Fraction) -> "Ingredient":
        """The same for more or fewer people."""
        return replace(self, amount=self.amount * factor)

    def __str__(self) -> str:
        number = str(float(self.amount)) if self.amount.denominator > 1 else str(self.amount)
        return " ".join(part for part in (number, self.unit, self.name) if part)


def parse_line(line: str) -> Ingredient:
    """One line, such as `200 g butter` or `2 eggs`; without a number it is one."""
    text = line.strip()
    amount = Fraction(1)
    match = AMOUNT.match(text)
    if match:
        amount = Fraction(match.group(1))
        text = text[match.end() :]
    first, _, rest = text.partition(" ")
    unit = canonical(first)
    if unit is None:
        return Ingredient(text, amount)
    return Ingredient(rest.removeprefix("of "), amount, unit)


def parse(text: str) -> list[Ingredient]:
    """All lines of a recipe."""
    return [parse_line(line) for line in text.splitlines() if line.strip()]
