"""More small functions with one mistake each, in the form of `bugs`.

Must not know: the other files of a project, or how the work is told.
"""

from __future__ import annotations

from random import Random

from conversations import words
from conversations.coding.bugs import Bug


def _ints(rng: Random, low: int, high: int, least: int = 2, most: int = 5) -> list[int]:
    return [rng.randrange(low, high) for _ in range(rng.randrange(least, most + 1))]


def _towns(rng: Random, least: int, most: int) -> list[str]:
    return [words.town(rng) for _ in range(rng.randrange(least, most + 1))]


def _repeated(rng: Random) -> str:
    names = _towns(rng, 2, 2)
    return str([*names, rng.choice(names)])


MEAN = Bug(
    ("stats", "scores", "summary"),
    "[mean|average_<noun>|mean_of_<nouns>]",
    "values: list[int]",
    "The mean of the values, 0 without any.",
    ("return sum(values) / len(values) if values else 0",),
    "return sum(values) / len(values) if values else 0",
    "return sum(values) / len(values)",
    lambda rng: str([4 * rng.randrange(1, 9) for _ in range(rng.choice((0, 0, 1, 2, 4)))]),
    "test_no_values_have_the_mean_0",
    ("<name> fails if there are no <nouns> yet.", "With an empty list <name> [crashes|stops with an error]."),
    ("The length of an empty list is 0, and nothing can be divided by it.",),
    "An empty list has the mean 0 now",
    "The mean of nothing is 0",
)
MEDIAN = Bug(
    ("stats", "scores", "summary"),
    "[median|middle_<noun>|median_of]",
    "values: list[int]",
    "The value in the middle; the lower one if there are two.",
    ("return sorted(values)[(len(values) - 1) // 2]",),
    "sorted(values)",
    "values",
    lambda rng: str(_ints(rng, 1, 50, 3, 5)),
    "test_the_order_does_not_matter",
    ("<name> depends on the order of the <nouns>.", "<name> is right only if the <nouns> are sorted."),
    ("The value in the middle of the list is taken, but the list is not sorted.",),
    "The values are sorted first",
    "The median no longer depends on the order",
)
BIGGEST = Bug(
    ("ranking", "reports", "lists"),
    "[largest|top_<nouns>|best_of]",
    "counts: dict[str, int], wanted: int",
    "The names with the highest counts, the highest first.",
    ("names = sorted(counts, key=lambda name: counts[name], reverse=True)", "return names[:wanted]"),
    ", reverse=True)",
    ")",
    lambda rng: f"{dict(zip(_towns(rng, 2, 2), rng.sample(range(1, 99), 2), strict=True))}, 1",
    "test_the_highest_comes_first",
    ("<name> shows the smallest <nouns> instead of the largest.", "The order of <name> is the wrong way round."),
    ("sorted() goes from the lowest to the highest, and the head is taken.",),
    "The order is reversed now",
    "The highest comes first",
)
UNIQUE = Bug(
    ("lists", "names", "imports"),
    "[without_repeats|unique_<nouns>|each_once]",
    "names: list[str]",
    "Every name once, in the order in which they come.",
    ("return list(dict.fromkeys(names))",),
    "list(dict.fromkeys(names))",
    "sorted(set(names))",
    _repeated,
    "test_the_order_stays",
    ("<name> changes the order of the names.", "The <nouns> come out sorted, but the order should stay."),
    ("A set has no order, and sorted() makes one of its own.",),
    "The names keep their order now",
    "Names keep their order",
)
PERCENT = Bug(
    ("stats", "shares", "reports"),
    "[percent|share_of|percent_of_<nouns>]",
    "part: int, whole: int",
    "Percent of the whole, rounded to a whole number.",
    ("return round(100 * part / whole)",),
    "round(100 * part / whole)",
    "int(100 * part / whole)",
    lambda rng: f"{rng.randrange(1, 40)}, {rng.randrange(40, 90)}",
    "test_percents_are_rounded",
    ("<name> always rounds down.", "The percents do not add up, they are often one too low."),
    ("int() cuts the fraction off instead of rounding.",),
    "Percents are rounded now",
    "Percents are rounded",
)
DAYS = Bug(
    ("dates", "rentals", "stays"),
    "[days_of|nights_and_days|length_in_days]",
    "first: int, last: int",
    "Days from the first to the last, both included.",
    ("return last - first + 1",),
    "last - first + 1",
    "last - first",
    lambda rng: "{}, {}".format(*sorted(rng.sample(range(1, 31), 2))),
    "test_both_ends_count",
    ("A <noun> that begins and ends on one day has length 0.", "<name> is one day too short."),
    ("The difference leaves one of the two ends out.",),
    "Both ends are counted now",
    "The last day counts",
)
CLAMP = Bug(
    ("levels", "limits", "sensors"),
    "[clamp|within|limited]",
    "value: int, low: int, high: int",
    "The value, or the nearest limit if it is outside.",
    ("return max(low, min(value, high))",),
    "max(low, min(value, high))",
    "min(low, max(value, high))",
    lambda rng: f"{rng.randrange(0, 60)}, {rng.randrange(5, 15)}, {rng.randrange(30, 45)}",
    "test_values_inside_stay",
    ("<name> always returns the lower limit.", "Values between the limits are changed by <name>."),
    ("min and max are the wrong way round.", "min() and max() are swapped, so the lower limit always wins."),
    "min and max have changed places",
    "Values between the limits stay as they are",
)
GREETING = Bug(
    ("texts", "labels", "letters"),
    "[listed|joined|names_in_words]",
    "names: list[str]",
    "The names with commas, and `and` before the last.",
    ('return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))',),
    "names[:-1]",
    "names[:-2]",
    lambda rng: str(_towns(rng, 1, 3)),
    "test_no_name_is_lost",
    ("<name> loses a name.", "With two or more names one is missing in the text."),
    ("The slice ends one too early, so the last name but one is lost.",),
    "The slice goes to the last name but one",
    "No name is lost in lists",
)
SHORTEN = Bug(
    ("texts", "labels", "titles"),
    "[shorten|cut|fitted]",
    "text: str, width: int",
    "The text, cut to the width with a star at its end.",
    ('return text if len(text) <= width else text[: width - 1] + "*"',),
    "text[: width - 1]",
    "text[:width]",
    lambda rng: f"{' '.join(_towns(rng, 2, 2))!r}, {rng.randrange(8, 14)}",
    "test_the_star_counts_as_well",
    ("Titles of <nouns> are longer than the width.", "<name> returns texts that are one character too long."),
    ("The text is cut at the width and the star comes on top.",),
    "The star is part of the width now",
    "Shortened texts fit",
)
RUNNING = Bug(
    ("ledger", "series", "accounts"),
    "[running_totals|balances|sums_so_far]",
    "start: int, changes: list[int]",
    "The balance after each change.",
    (
        "balance, found = start, []",
        "for change in changes:",
        "    balance += change",
        "    found.append(balance)",
        "return found",
    ),
    "balance, found = start, []",
    "balance, found = 0, []",
    lambda rng: f"{rng.choice((0, 10, 25, 40, 100))}, {_ints(rng, -9, 20, 2, 3)}",
    "test_begins_with_the_start",
    ("<name> ignores what was there before.", "The balances of <nouns> begin at 0 instead of the start."),
    ("The argument start is never used; the balance begins at 0.",),
    "The balance begins with the start",
    "Balances begin with what was there",
)
COUNTING = Bug(
    ("counts", "stats", "votes"),
    "[count_each|tally|count_<nouns>]",
    "names: list[str]",
    "How often each name comes.",
    (
        "counts: dict[str, int] = {}",
        "for name in names:",
        "    counts[name] = counts.get(name, 0) + 1",
        "return counts",
    ),
    "counts.get(name, 0) + 1",
    "1",
    _repeated,
    "test_repeated_names_are_counted",
    ("<name> never counts above 1.", "A name that comes twice is counted once."),
    ("Each time a name comes its count is set to 1 again.",),
    "The count before is added now",
    "Names that come again are counted",
)
WEIGHTED = Bug(
    ("levels", "sensors", "units"),
    "[fahrenheit|as_fahrenheit|to_fahrenheit]",
    "celsius: int",
    "Degrees Fahrenheit, a whole number.",
    ("return round(celsius * 9 / 5) + 32",),
    "celsius * 9 / 5",
    "celsius * 5 / 9",
    lambda rng: str(5 * rng.randrange(-4, 9)),
    "test_boiling_water_is_hot",
    ("<name> is wrong for everything but 0 degrees.", "The temperatures in Fahrenheit are too low."),
    ("The factor is upside down, 5 / 9 instead of 9 / 5.",),
    "The factor is 9 / 5 now",
    "Degrees Fahrenheit are right",
)
MORE_BUGS: tuple[Bug, ...] = (
    MEAN, MEDIAN, BIGGEST, UNIQUE, PERCENT, DAYS, CLAMP, GREETING, SHORTEN, RUNNING, COUNTING, WEIGHTED,
)  # fmt: skip
