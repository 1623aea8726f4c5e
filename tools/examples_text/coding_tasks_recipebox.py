"""Tasks in the project `recipebox`."""

from __future__ import annotations

from examples_text.coding_task import Edit, Failure, Task, after, failure

PROJECT = "recipebox"
PARSER, SHOPPING, UNITS = "recipebox/parser.py", "recipebox/shopping.py", "recipebox/units.py"
TEST_PARSER, TEST_SHOPPING = "tests/test_parser.py", "tests/test_shopping.py"
LAST_PARSER = '    assert parse_line("3 eggs").scaled(Fraction(2)).amount == 6\n'
REFUSES = "test_refuses_to_turn_mass_into_volume"
LAST_SHOPPING = '    assert convert(2, "tbsp", "tsp") == 6\n'

MIXED = Task(
    "mixed",
    PROJECT,
    "\"1 1/2 cups flour\" from the README is read as one piece of \"1/2 cups flour\". Plain fractions "
    "work. Can you make mixed numbers work as well?",
    (PARSER, UNITS, TEST_PARSER),
    "AMOUNT",
    "The pattern for amounts takes either a fraction or a decimal number. Of 1 1/2 it takes the 1 and "
    "leaves the rest as the text, where no unit is found, so the whole rest becomes the name. It needs "
    "an alternative for a whole number in front of a fraction.",
    after(
        TEST_PARSER,
        LAST_PARSER,
        "\n\ndef test_reads_mixed_numbers():\n"
        '    assert parse_line("1 1/2 cups flour") == Ingredient("flour", Fraction(3, 2), "cup")\n',
        "The example of the README as a test.",
    ),
    (
        failure(
            f"{TEST_PARSER}::test_reads_mixed_numbers",
            'assert parse_line("1 1/2 cups flour")',
            "AssertionError: assert Ingredient(na...1), unit=None) == Ingredient(na...), unit='cup')",
            "  ",
            "  Differing attributes:",
            "  ['name', 'amount', 'unit']",
            "  ",
            "  Drill down into differing attribute name:",
            "    name: '1/2 cups flour' != 'flour'",
            "    - flour...",
            "  ",
            "  ...Full output truncated, use '-vv' to show",
        ),
    ),
    (
        Edit(
            PARSER,
            'AMOUNT = re.compile(r"^(\\d+/\\d+|\\d+(?:\\.\\d+)?)\\s*")',
            'AMOUNT = re.compile(r"^(?:(?:(\\d+) )?(\\d+/\\d+)|(\\d+(?:\\.\\d+)?))\\s*")',
            "Now the pattern has three groups: a whole number, a fraction, or a decimal number on its "
            "own. The fraction has to be tried first, or 1 would win again.",
        ),
        Edit(
            PARSER,
            "        amount = Fraction(match.group(1))\n",
            "        whole, part, number = match.groups()\n"
            "        amount = Fraction(whole or 0) + Fraction(part or number)\n",
            "And the amount is the sum of what was found.",
        ),
    ),
    "Mixed numbers such as 1 1/2 are read now. The pattern in recipebox/parser.py knew fractions and "
    "decimal numbers, but not one after the other. A line like \"1 1/2-inch piece of ginger\" is read as "
    "one and a half now, where it was one before; I don't see how to tell the two apart without knowing "
    "about inches.",
    follow=(
        "Fair enough, nobody writes inches here. Can it also read the character ½? People paste that "
        "from websites.",
        (
            Edit(
                PARSER,
                "    text = line.strip()\n",
                '    text = VULGAR.sub(lambda found: f" {SIGNS[found.group()]}", line).strip()\n',
                "I replace such characters by a space and the fraction before anything else is read, so "
                "1½ becomes 1 1/2.",
            ),
            after(
                PARSER,
                '|(\\d+(?:\\.\\d+)?))\\s*")\n',
                'SIGNS = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4"}\n'
                'VULGAR = re.compile("[" + "".join(SIGNS) + "]")\n',
                "And the table of the common ones.",
            ),
        ),
        "½ and its four common siblings are read now, alone or behind a whole number, as in 1½ cups. "
        "They are replaced before anything else happens, so the rest of the parser does not know about "
        "them. With a space in between, as in 1 ½, there would be two spaces; tell me if you have seen "
        "that, and I'll allow for it.",
    ),
)

THIRDS = Task(
    "thirds",
    PROJECT,
    "When I scale a recipe for three people down to one, I get \"0.3333333333333333 cup milk\". Please "
    "show fractions the way cooks write them, 1/3 and 1 1/2.",
    (PARSER, TEST_PARSER),
    ".amount",
    "The amount is a Fraction all the time, so nothing is lost; only __str__ turns it into a float. A "
    "whole part and a rest can be had with divmod, and Fraction already prints as 1/3.",
    after(
        TEST_PARSER,
        LAST_PARSER,
        "\n\ndef test_shows_fractions():\n"
        '    third = parse_line("1 cup milk").scaled(Fraction(1, 3))\n'
        '    assert str(third) == "1/3 cup milk"\n'
        "\n\ndef test_shows_mixed_numbers():\n"
        '    assert str(Ingredient("flour", Fraction(3, 2), "cup")) == "1 1/2 cup flour"\n',
        "One test below one, and one above.",
    ),
    (
        failure(
            f"{TEST_PARSER}::test_shows_fractions",
            'assert str(third) == "1/3 cup milk"',
            "AssertionError: assert '0.3333333333333333 cup milk' == '1/3 cup milk'",
            "  ",
            "  - 1/3 cup milk",
            "  + 0.3333333333333333 cup milk",
        ),
        failure(
            f"{TEST_PARSER}::test_shows_mixed_numbers",
            '== "1 1/2 cup flour"',
            "AssertionError: assert '1.5 cup flour' == '1 1/2 cup flour'",
            "  ",
            "  - 1 1/2 cup flour",
            "  ?  ^^^^",
            "  + 1.5 cup flour",
            "  ?  ^^",
        ),
    ),
    (
        Edit(
            PARSER,
            "        number = str(float(self.amount)) if self.amount.denominator > 1 else str(self.amount)\n"
            '        return " ".join(part for part in (number, self.unit, self.name) if part)\n',
            "        whole, rest = divmod(self.amount, 1)\n"
            '        number = " ".join(str(part) for part in (whole, rest) if part) or "0"\n'
            '        return " ".join(part for part in (number, self.unit, self.name) if part)\n',
            "Both parts are shown if they are not zero, and a zero if both are.",
        ),
    ),
    "Amounts are shown as 1/3 or 1 1/2 now; only __str__ in recipebox/parser.py has changed. Grams get "
    "fractions as well, so half of 125 g is 62 1/2 g, which is exact but not how one would write it. "
    "Units stay in the singular, as they were.",
    follow=(
        "For grams and millilitres I'd rather have it rounded to whole numbers. What would you do?",
        (
            Edit(
                PARSER,
                "        whole, rest = divmod(self.amount, 1)\n",
                "        amount = Fraction(round(self.amount)) if self.unit in ROUNDED else self.amount\n"
                "        whole, rest = divmod(amount, 1)\n",
                "I would round when it is shown and keep the exact amount inside, so that scaling twice "
                "does not add up errors.",
            ),
            after(
                PARSER,
                "from recipebox.units import canonical\n",
                '\nROUNDED = ("g", "ml")\n',
                "",
            ),
        ),
        "Grams and millilitres are rounded in the text only; the amount itself stays exact. 62 1/2 g is "
        "shown as 62 g, because Python rounds halves to the even number. All tests pass. Less than half "
        "a gram would be shown as 0 g, so tell me if you have recipes with saffron.",
    ),
)

PLURALS = Task(
    "plurals",
    PROJECT,
    "The shopping list has \"1 egg\" and \"2 eggs\" as two lines. It should be \"3 eggs\". Please don't "
    "touch things with a unit: there is \"100 g molasses\" in one of my recipes.",
    (SHOPPING, PARSER, TEST_SHOPPING),
    ".name",
    "Lines are added up if name and unit are the same, and egg and eggs are different names. For things "
    "that are counted the name can be brought to one form first, and the s put back for more than one. "
    "Things with a unit stay as they are, so molasses is safe.",
    after(
        TEST_SHOPPING,
        LAST_SHOPPING,
        "\n\ndef test_one_and_many_are_the_same_thing():\n"
        '    assert names([parse("1 egg"), parse("2 eggs")]) == ["3 eggs"]\n'
        "\n\ndef test_names_with_a_unit_stay():\n"
        '    assert names([parse("100 g molasses")]) == ["100 g molasses"]\n',
        "The second test is for the molasses.",
    ),
    (
        failure(
            f"{TEST_SHOPPING}::test_one_and_many_are_the_same_thing",
            'parse("1 egg"), parse("2 eggs")',
            "AssertionError: assert ['1 egg', '2 eggs'] == ['3 eggs']",
            "  ",
            "  At index 0 diff: '1 egg' != '3 eggs'",
            "  Left contains one more item: '2 eggs'",
            "  Use -v to get more diff",
        ),
    ),
    (
        after(
            SHOPPING,
            '    return "g" if unit in GRAMS else None\n',
            "\n\ndef counted_name(name: str, amount: Fraction) -> str:\n"
            '    """The name of a counted thing: `egg` up to one, `eggs` for more."""\n'
            '    singular = name.removesuffix("s")\n'
            '    return singular if amount <= 1 else f"{singular}s"\n',
            "First the two forms of a name.",
        ),
        Edit(
            SHOPPING,
            "            key = (item.name, unit)\n",
            "            name = item.name if unit else counted_name(item.name, Fraction(1))\n"
            "            key = (name, unit)\n",
            "Totals of counted things are kept under the singular.",
        ),
        Edit(
            SHOPPING,
            "    lines = [Ingredient(name, amount, unit) for (name, unit), amount in totals.items()]\n",
            "    lines = [\n"
            "        Ingredient(name if unit else counted_name(name, amount), amount, unit)\n"
            "        for (name, unit), amount in totals.items()\n"
            "    ]\n",
            "And shown in the form that fits the total.",
        ),
    ),
    "Counted things are added up under their singular and shown with an s for more than one, so 1 egg "
    "and 2 eggs are 3 eggs. Things with a unit are not touched. The rule is as simple as it looks: "
    "tomato and tomatoes are still two lines, and two bunches become bunche and bunches in the wrong "
    "place. If that happens in your recipes, a short list of exceptions would be the next step.",
)

KINDS = Task(
    "kinds",
    PROJECT,
    "convert(1, \"g\", \"ml\") raises KeyError: 'ml'. The function has a nice ValueError for that at its "
    "end, but never gets there. Callers catch ValueError.",
    (UNITS, TEST_SHOPPING),
    "convert(",
    "convert looks for the table that has the unit, and then takes the other unit from the same table "
    "without asking whether it is there. The error at the end is reached only if the first unit is "
    "unknown. Both have to be in the same table.",
    Edit(
        TEST_SHOPPING,
        'def test_converts_volumes():\n    assert convert(2, "tbsp", "tsp") == 6\n',
        'def test_converts_volumes():\n    assert convert(2, "tbsp", "tsp") == 6\n'
        "\n\ndef test_refuses_to_turn_mass_into_volume():\n"
        '    with pytest.raises(ValueError, match="cannot convert g to ml"):\n'
        '        convert(1, "g", "ml")\n',
        "The tests of convert are in test_shopping.py, so mine goes there.",
    ),
    (
        Failure(
            f"{TEST_SHOPPING}::{REFUSES}",
            (
                (
                    (
                        (TEST_SHOPPING, REFUSES, "with pytest.raises(ValueError"),
                    ),
                    ("NameError: name 'pytest' is not defined",),
                ),
            ),
        ),
    ),
    (
        Edit(
            UNITS,
            "        if unit in table:\n",
            "        if unit in table and to in table:\n",
            "Now the change itself: both units have to be in the same table.",
        ),
    ),
    "convert() raises its ValueError for every pair of units that cannot be converted, because it now "
    "asks whether both are in the same table. Before, it took the second one for granted. My test forgot "
    "an import at first, which is why it was run twice. Nothing in the package calls convert() with "
    "units of different kinds, so nothing else changes.",
    wrong=(
        Edit(
            TEST_SHOPPING,
            "from recipebox.parser import parse\n",
            "import pytest\nfrom recipebox.parser import parse\n",
            "That is my mistake and not the bug: the file does not import pytest yet. I add the import, "
            "so that the test fails for the right reason.",
        ),
        Failure(
            f"{TEST_SHOPPING}::{REFUSES}",
            (
                (
                    (
                        (TEST_SHOPPING, REFUSES, 'convert(1, "g", "ml")'),
                        (UNITS, "convert", "return amount * table[unit] / table[to]"),
                    ),
                    ("KeyError: 'ml'",),
                ),
            ),
        ),
    ),
)

TASKS = (MIXED, THIRDS, PLURALS, KINDS)
