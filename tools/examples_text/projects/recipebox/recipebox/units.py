"""Units of volume and mass."""

MILLILITRES = {"ml": 1.0, "l": 1000.0, "tsp": 5.0, "tbsp": 15.0, "cup": 240.0}
GRAMS = {"g": 1.0, "kg": 1000.0, "oz": 28.35, "lb": 453.6}
NAMES = {
    "cups": "cup",
    "teaspoon": "tsp",
    "teaspoons": "tsp",
    "tablespoon": "tbsp",
    "tablespoons": "tbsp",
    "litre": "l",
    "gram": "g",
    "grams": "g",
}


def canonical(name: str) -> str | None:
    """The short name of a unit, or None if it is not one."""
    name = name.lower().rstrip(".")
    name = NAMES.get(name, name)
    return name if name in MILLILITRES or name in GRAMS else None


def convert(amount: float, unit: str, to: str) -> float:
    """An amount in another unit of the same kind."""
    for table in (MILLILITRES, GRAMS):
        if unit in table:
            return amount * table[unit] / table[to]
    raise ValueError(f"cannot convert {unit} to {to}")
