"""Several recipes on one list."""

from collections.abc import Iterable
from fractions import Fraction

from recipebox.parser import Ingredient
from recipebox.units import GRAMS, MILLILITRES, convert


def base_unit(unit: str | None) -> str | None:
    """The unit in which amounts are added up."""
    if unit in MILLILITRES:
        return "ml"
    return "g" if unit in GRAMS else None


def shopping_list(recipes: Iterable[list[Ingredient]]) -> list[Ingredient]:
    """Everything that is needed, by name; the same thing in the same kind of unit is one line."""
    totals: dict[tuple[str, str | None], Fraction] = {}
    for recipe in recipes:
        for item in recipe:
            unit = base_unit(item.unit)
            amount = item.amount
            if unit is not None:
                amount = Fraction(convert(float(amount), item.unit, unit)).limit_denominator(1000)
            key = (item.name, unit)
            totals[key] = totals.get(key, Fraction(0)) + amount
    lines = [Ingredient(name, amount, unit) for (name, unit), amount in totals.items()]
    return sorted(lines, key=lambda item: item.name)
