"""Small functions with one mistake each: the right code, the wrong piece of it, and what is said about it.

`<noun>` and `<nouns>` are what the project is about, `<name>` is the function. Must not know: the other files
of a project, or how the work is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from conversations import words


@dataclass(frozen=True)
class Bug:
    """A function whose body has the fragment `right` once; with `wrong` in its place it has the mistake.

    args draws the text of arguments; `rest` is what they are for calls where both agree, if that needs another draw.
    reports are what a developer may write, reasons what is wrong in the code, fixed what was done.
    """

    modules: tuple[str, ...]
    name: str
    signature: str
    doc: str
    body: tuple[str, ...]
    right: str
    wrong: str
    args: Callable[[Random], str]
    test: str
    reports: tuple[str, ...]
    reasons: tuple[str, ...]
    fixed: str
    changelog: str
    imports: str = ""


def _ints(rng: Random, low: int, high: int, least: int = 3, most: int = 5) -> list[int]:
    return [rng.randrange(low, high) for _ in range(rng.randrange(least, most + 1))]


def _pairs(rng: Random) -> str:
    return str([(rng.randrange(2, 60), rng.randrange(1, 7)) for _ in range(rng.randrange(2, 4))])


def _name(rng: Random) -> str:
    return rng.choice((words.town(rng), words.given_name(rng), words.family_name(rng)))


def _names(rng: Random, least: int = 2, most: int = 4) -> list[str]:
    return [_name(rng) for _ in range(rng.randrange(least, most + 1))]


def _mixed_case(rng: Random) -> str:
    names = _names(rng, 2, 3)
    wanted = rng.choice((names[0], names[-1].lower(), names[0].upper()))
    return f"{names}, {wanted!r}"


def _setting(rng: Random) -> str:
    key = rng.choice(("path", "title", "query", "filter", "label", "rule"))
    value = rng.choice((f"{_name(rng).lower()}={rng.randrange(9)}", _name(rng).lower()))
    return repr(f"{key}={value}")


def _left(rng: Random) -> str:
    return f"{dict.fromkeys(_names(rng, 1, 1), rng.randrange(1, 7))}, {rng.randrange(2, 6)}"


def _clock(rng: Random) -> str:
    return str(60 * rng.randrange(1, 20) + rng.choice((3, 5, 8, 9, 15, 30, 45)))


TOTAL = Bug(
    ("prices", "ledger", "bills"),
    "[total_price|total_cents|sum_of_<nouns>|<noun>_total]",
    "lines: list[tuple[int, int]]",
    "The price of all lines; a line is a price and a count.",
    ("return sum(price * count for price, count in lines)",),
    "price * count",
    "price",
    _pairs,
    "test_counts_every_piece",
    (
        "<name> forgets how many pieces there are.",
        "A <noun> with several pieces is [too cheap|charged only once].",
        "The total of a <noun> is too low as soon as a count is above 1.",
    ),
    ("<name> adds the prices and never looks at the counts.", "The count of each line is read but not used."),
    "Each price is now multiplied by its count",
    "Totals count every piece",
)
CEILING = Bug(
    ("pages", "boxes", "layout"),
    "[page_count|boxes_needed|sheets_for|trips_for]",
    "<nouns>: int, size: int",
    "How many are needed for all <nouns>, the last one may be partly empty.",
    ("return -(-<nouns> // size)",),
    "-(-<nouns> // size)",
    "<nouns> // size",
    lambda rng: f"{rng.randrange(5, 90)}, {rng.randrange(2, 12)}",
    "test_the_last_one_may_be_partly_empty",
    (
        "The last <nouns> are lost if they do not fill a whole one.",
        "<name> is one too low unless everything fits exactly.",
    ),
    ("The division rounds down, so a rest is dropped.", "`//` rounds down, and the rest needs one more."),
    "The division rounds up now",
    "A rest gets a place of its own",
)
THRESHOLD = Bug(
    ("rules", "stock", "alarms"),
    "[low_<nouns>|to_order|almost_out]",
    "left: dict[str, int], limit: int",
    "Names of which at most `limit` are left.",
    ("return [name for name, count in left.items() if count <= limit]",),
    "count <= limit",
    "count < limit",
    _left,
    "test_exactly_at_the_limit_counts",
    (
        "A <noun> that is exactly at the limit is not listed.",
        "<name> leaves out what has exactly the limit left.",
    ),
    ("The comparison is `<`, so the limit itself counts as fine.", "`count < limit` leaves the limit out."),
    "The comparison includes the limit now",
    "What is exactly at the limit is listed",
)
WINDOW = Bug(
    ("stats", "series", "trends"),
    "[moving_sums|window_sums|sums_of]",
    "values: list[int], size: int",
    "The sum of each `size` values in a row.",
    ("return [sum(values[start : start + size]) for start in range(len(values) - size + 1)]",),
    "range(len(values) - size + 1)",
    "range(len(values) - size)",
    lambda rng: f"{_ints(rng, 1, 20, 3, 5)}, {rng.randrange(2, 4)}",
    "test_the_last_window_counts",
    ("<name> [misses|leaves out] the last window.", "There is one sum too few in <name>."),
    ("range() ends one too early, so the last window is never summed.",),
    "The range goes to the last window now",
    "The last window is summed as well",
)
CHUNKS = Bug(
    ("batches", "pages", "export"),
    "[chunks|batches|in_groups]",
    "<nouns>: list[int], size: int",
    "The <nouns> in groups of `size`; the last group may be shorter.",
    ("return [<nouns>[at : at + size] for at in range(0, len(<nouns>), size)]",),
    "range(0, len(<nouns>), size)",
    "range(0, len(<nouns>) - size, size)",
    lambda rng: f"{_ints(rng, 1, 30, 3, 6)}, {rng.randrange(2, 4)}",
    "test_the_last_group_is_kept",
    ("The last group of <nouns> is missing.", "<name> loses the <nouns> at the end."),
    ("The range stops `size` too early, and the last group is lost.",),
    "The range goes to the end of the list now",
    "The last group is kept",
)
DURATION = Bug(
    ("times", "clock", "shifts"),
    "[as_minutes|read_duration|minutes_of]",
    "text: str",
    "Minutes of a text such as 1:45, hours and minutes.",
    ('hours, minutes = text.split(":")', "return int(hours) * 60 + int(minutes)"),
    "int(hours) * 60",
    "int(hours)",
    lambda rng: repr(f"{rng.randrange(0, 9)}:{rng.choice((5, 10, 15, 20, 30, 45)):02d}"),
    "test_an_hour_has_sixty_minutes",
    ("Hours are [counted as minutes|not turned into minutes].", "<name> is far too low for more than an hour."),
    ("The hours are added as they are, without the factor 60.", "The factor 60 for the hours is missing."),
    "Hours are multiplied by 60 now",
    "Hours count sixty minutes each",
)
CLOCK = Bug(
    ("times", "clock", "labels"),
    "[as_clock|clock_text|time_label]",
    "minutes: int",
    "Minutes after midnight as H:MM.",
    ('return f"{minutes // 60}:{minutes % 60:02d}"',),
    "{minutes % 60:02d}",
    "{minutes % 60}",
    _clock,
    "test_minutes_have_two_digits",
    ("Minutes below ten are shown with one digit.", "The time looks wrong in the first ten minutes of an hour."),
    ("The minutes are written without a leading zero.", "The format has no width, so 5 stays 5."),
    "The minutes have two digits now",
    "Times have two digits for the minutes",
)
SETTING = Bug(
    ("settings", "parser", "options"),
    "[read_setting|split_line|parse_option]",
    "line: str",
    "Name and value of a line; the value may contain an equals sign.",
    ('name, value = line.split("=", 1)', "return name.strip(), value.strip()"),
    'split("=", 1)',
    'split("=")',
    _setting,
    "test_the_value_may_contain_an_equals_sign",
    (
        "A value with an equals sign cannot be read.",
        "<name> stops at values that have `=` in them.",
    ),
    ("The line is split at every equals sign, so there can be three parts.",),
    "The line is split at the first equals sign only",
    "Values may contain an equals sign",
)
FIND = Bug(
    ("names", "search", "lookup"),
    "[has_name|is_known|contains_<noun>]",
    "names: list[str], wanted: str",
    "Whether a name is there, in capitals or not.",
    ("return wanted.casefold() in [name.casefold() for name in names]",),
    "wanted.casefold() in",
    "wanted in",
    _mixed_case,
    "test_capitals_do_not_matter",
    ("A name in capitals is not found.", "<name> does not find names that are written in another case."),
    ("Only the names are folded, the wanted one is compared as it is.",),
    "The wanted name is folded like the others",
    "Names are found in capitals or not",
)
BUGS: tuple[Bug, ...] = (TOTAL, CEILING, THRESHOLD, WINDOW, CHUNKS, DURATION, CLOCK, SETTING, FIND)
