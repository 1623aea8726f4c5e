"""Tasks in the project `stocktake`."""

from __future__ import annotations

from examples_text.coding_task import Edit, Failure, Task, after, changelog, failure

PROJECT = "stocktake"
LEDGER, REPORT = "stocktake/ledger.py", "stocktake/report.py"
TEST_LEDGER, TEST_REPORT = "tests/test_ledger.py", "tests/test_report.py"
NOT_AN_INT = "invalid literal for int() with base 10: '1,200'"
LAST_LEDGER = '        movements("2024-03-01,A-1,5,", "yesterday,A-1,5,")\n'
LAST_REPORT = '    assert table.splitlines()[0].split() == ["sku", "name", "left", "order"]\n'

THOUSANDS = Task(
    "thousands",
    PROJECT,
    "Our accounting system exports quantities with separators, like \"1,200\" in quotes or 1 200 with a "
    "space. stocktake stops at the first of them with LedgerError: line 2: invalid literal for int() "
    "with base 10: '1,200'. Please make it accept both. It must not accept 12,50 though, because that is "
    "a typing mistake.",
    (LEDGER, TEST_LEDGER),
    "int(",
    "read_movements hands the text of the quantity straight to int(), so any separator is an error, and "
    "read_items does the same with its two numbers. The error message with the line number is right and "
    "should stay. I'll write a test with both kinds of separators.",
    after(
        TEST_LEDGER,
        LAST_LEDGER,
        "\n\ndef test_separators_between_thousands():\n"
        "    rows = movements('2024-03-01,A-1,\"1,200\",', \"2024-03-02,A-1,-1 000,\")\n"
        '    assert balance(rows) == {"A-1": 200}\n'
        "\n\ndef test_a_comma_elsewhere_is_a_mistake():\n"
        '    with pytest.raises(LedgerError, match="12,50"):\n'
        "        movements('2024-03-01,A-1,\"12,50\",')\n",
        "Two tests: one for what should be read, and one for what should still be refused.",
    ),
    (
        Failure(
            f"{TEST_LEDGER}::test_separators_between_thousands",
            (
                (
                    ((LEDGER, "read_movements", 'quantity=int(row["quantity"])'),),
                    (f"ValueError: {NOT_AN_INT}",),
                ),
                (
                    (
                        (TEST_LEDGER, "test_separators_between_thousands", "1,200"),
                        (TEST_LEDGER, "movements", "return list(read_movements"),
                        (LEDGER, "read_movements", "raise LedgerError"),
                    ),
                    (f"stocktake.ledger.LedgerError: line 2: {NOT_AN_INT}",),
                ),
            ),
        ),
    ),
    (
        Edit(
            LEDGER,
            "import csv\nfrom collections import defaultdict\n",
            "import csv\nimport re\nfrom collections import defaultdict\n",
            "It fails for the reason that was reported. I'll remove a separator only if exactly three "
            "digits follow it, so 12,50 stays an error.",
        ),
        after(
            LEDGER,
            '    """A file that cannot be understood; the message names the line."""\n',
            "\n\ndef whole(text: str) -> int:\n"
            '    """A whole number, with or without separators between the thousands."""\n'
            '    return int(re.sub(r"(?<=\\d)[ ,](?=\\d{3}(?!\\d))", "", text.strip()))\n',
            "Now the function itself, next to the error.",
        ),
        Edit(
            LEDGER,
            'quantity=int(row["quantity"])',
            'quantity=whole(row["quantity"])',
            "And its use for movements.",
        ),
    ),
    "Quantities may now be written as 1,200 or 1 200. The text went straight to int(); a new function, "
    "whole() in stocktake/ledger.py, removes a comma or a space between a digit and exactly three more. "
    "12,50 is refused as before, with the line number. I did not change read_items, which still wants "
    "plain numbers in its two columns.",
)

THRESHOLD = Task(
    "threshold",
    PROJECT,
    "The report does not list items that have exactly as many pieces left as their reorder_at. Last "
    "month we had 100 bolts with reorder_at 100, nobody was told, and then there were none. Can you fix "
    "that?",
    (REPORT, TEST_REPORT),
    "reorder_at",
    "to_reorder compares with `<`, so an item at its threshold counts as fine. The name reorder_at says "
    "that one should order when that number is reached. The existing tests use 3 and 101 pieces, neither "
    "of which is the threshold itself, and that is why they pass.",
    after(
        TEST_REPORT,
        LAST_REPORT,
        "\n\ndef test_exactly_at_the_threshold_is_low():\n"
        '    assert [item.sku for item, _ in to_reorder(ITEMS, {"A-1": 100, "A-2": 700})] == ["A-1"]\n',
        "A test with exactly 100 pieces.",
    ),
    (
        failure(
            f"{TEST_REPORT}::test_exactly_at_the_threshold_is_low",
            '{"A-1": 100, "A-2": 700}',
            "AssertionError: assert [] == ['A-1']",
            "  ",
            "  Right contains one more item: 'A-1'",
            "  Use -v to get more diff",
        ),
    ),
    (
        Edit(
            REPORT,
            "if pieces < item.reorder_at:",
            "if pieces <= item.reorder_at:",
            "The list is empty, as reported. The comparison has to include the threshold.",
        ),
    ),
    "Items with exactly reorder_at pieces are in the report now. The comparison in to_reorder "
    "(stocktake/report.py) was `<` and is `<=`; a test with 100 of 100 pieces keeps it that way. Items "
    "with a reorder_at of 0 will now be listed when they are sold out, which I think is what one "
    "expects, but please check whether you use 0 for things that are not kept any more.",
    follow=(
        "Good point about 0. We use it for discontinued items, so they must not show up. Can you leave "
        "those out?",
        (
            Edit(
                REPORT,
                "if pieces <= item.reorder_at:",
                "if item.reorder_at > 0 and pieces <= item.reorder_at:",
                "Then an item with a threshold of 0 is never low.",
            ),
            after(
                TEST_REPORT,
                '{"A-1": 100, "A-2": 700})] == ["A-1"]\n',
                "\n\ndef test_discontinued_items_are_left_out():\n"
                '    old = Item("A-9", "Wing nut", reorder_at=0, reorder_quantity=0)\n'
                '    assert to_reorder({"A-9": old}, {}) == []\n',
                "And a test, so that nobody simplifies it away.",
            ),
        ),
        "Items with a reorder_at of 0 are never listed now, whatever is left of them, and a test says "
        "so. All tests pass. It would be worth a sentence in the README, since 0 now has a meaning; tell "
        "me if I should add it.",
    ),
)

BELOW_ZERO = Task(
    "below-zero",
    PROJECT,
    "balance() is happy to return negative stock. In reality that means that a delivery has not been "
    "entered. Please let it raise a LedgerError that names the day and the item, at the movement that "
    "takes it below zero, even if a later movement makes up for it.",
    (LEDGER, TEST_LEDGER),
    "balance",
    "balance() adds movements in the order in which they come and never looks at the sum. It has to be "
    "checked after each movement, because a later delivery can hide the problem at the end.",
    after(
        TEST_LEDGER,
        LAST_LEDGER,
        "\n\ndef test_refuses_to_go_below_zero():\n"
        '    rows = movements("2024-03-01,A-1,5,", "2024-03-02,A-1,-8,", "2024-03-03,A-1,10,")\n'
        '    with pytest.raises(LedgerError, match="2024-03-02: A-1"):\n'
        "        balance(rows)\n",
        "The test has a delivery on the third day that hides the hole on the second.",
    ),
    (
        failure(
            f"{TEST_LEDGER}::test_refuses_to_go_below_zero",
            'with pytest.raises(LedgerError, match="2024-03-02: A-1")',
            "Failed: DID NOT RAISE LedgerError",
        ),
    ),
    (
        Edit(
            LEDGER,
            "    for sku, pieces in left.items():\n"
            "        if pieces < 0:\n"
            '            raise LedgerError(f"{sku}: {pieces} pieces left")\n'
            "    return dict(left)\n",
            "    return dict(left)\n",
            "That was the mistake I wanted to avoid: I looked at the end only, where the delivery has "
            "already hidden it. First I take the check out again.",
        ),
        after(
            LEDGER,
            "        left[movement.sku] += movement.quantity\n",
            "        if left[movement.sku] < 0:\n"
            "            raise LedgerError(\n"
            '                f"{movement.day}: {movement.sku} would be at {left[movement.sku]} pieces"\n'
            "            )\n",
            "And put it where the sum changes, with the day in the message.",
        ),
    ),
    "balance() now raises a LedgerError with the day, the item and the number of pieces as soon as a "
    "movement takes an item below zero. My first attempt checked the sums at the end and missed a hole "
    "that a later delivery fills, which is what the new test has. Movements are taken in the order of "
    "the file; if a file is not in the order of its days, the error may name a day that looks innocent. "
    "I left that as it is.",
    wrong=(
        Edit(
            LEDGER,
            "    return dict(left)\n",
            "    for sku, pieces in left.items():\n"
            "        if pieces < 0:\n"
            '            raise LedgerError(f"{sku}: {pieces} pieces left")\n'
            "    return dict(left)\n",
            "It does not raise yet, as expected. I add a check to balance().",
        ),
        failure(
            f"{TEST_LEDGER}::test_refuses_to_go_below_zero",
            'with pytest.raises(LedgerError, match="2024-03-02: A-1")',
            "Failed: DID NOT RAISE LedgerError",
        ),
    ),
)

COLUMNS = Task(
    "columns",
    PROJECT,
    "The table is crooked as soon as an item has a long name:\n\n"
    "sku       name      left      order\n"
    "A-1       Bolt M8   3         500\n"
    "A-300     Stainless hexagon bolt M8  0         20\n\n"
    "Can the columns be as wide as what is in them?",
    (REPORT, TEST_REPORT),
    "as_table",
    "as_table takes the widths from the header alone, with a minimum of 8. Any cell that is longer "
    "pushes the rest of its row to the right. The widths have to come from all rows, the header included.",
    after(
        TEST_REPORT,
        LAST_REPORT,
        "\n\ndef test_columns_line_up():\n"
        '    long = Item("A-300", "Stainless hexagon bolt M8", reorder_at=1, reorder_quantity=20)\n'
        "    lines = as_table(as_rows([(BOLT, 3), (long, 0)])).splitlines()\n"
        '    assert lines[1].index(" 3 ") == lines[2].index(" 0 ")\n',
        "The test compares where the third column begins in two rows.",
    ),
    (
        failure(
            f"{TEST_REPORT}::test_columns_line_up",
            'assert lines[1].index(" 3 ")',
            "AssertionError: assert 19 == 36",
            " +  where 19 = <built-in method index of str object at 0x7fc3682547b0>(' 3 ')",
            " +    where <built-in method index of str object at 0x7fc3682547b0> = "
            "'A-1       Bolt M8   3         500'.index",
            " +  and   36 = <built-in method index of str object at 0x7fc36823b600>(' 0 ')",
            " +    where <built-in method index of str object at 0x7fc36823b600> = "
            "'A-300     Stainless hexagon bolt M8  0         20'.index",
        ),
    ),
    (
        Edit(
            REPORT,
            "    widths = [max(len(column), 8) for column in COLUMNS]\n",
            "    widths = [max(map(len, cells)) for cells in zip(COLUMNS, *rows, strict=True)]\n",
            "The third column begins 17 characters later in the second row. zip() turns rows into "
            "columns, so the width is the longest cell of each.",
        ),
    ),
    "The columns are as wide as their longest cell now, so long names no longer push the rest of the row "
    "away. Only the line in as_table (stocktake/report.py) that computes the widths has changed. Tables "
    "with short cells become narrower than before, because the minimum of 8 is gone; no test or document "
    "depends on it.",
    follow=(
        "Looks good. Please put it into the changelog, then I'll merge.",
        (changelog("The columns of the report are as wide as their longest cell."),),
        "It's in CHANGELOG.md under Unreleased. All seven tests and the new one pass, so it is ready to "
        "merge.",
    ),
)

TASKS = (THOUSANDS, THRESHOLD, BELOW_ZERO, COLUMNS)
