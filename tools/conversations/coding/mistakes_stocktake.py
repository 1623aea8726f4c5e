"""Mistakes and wishes in the project `stocktake`."""

from __future__ import annotations

from conversations.coding.mistake import Mistake

SKUS = ("A-1", "A-7", "B-12", "C-305", "K-44", "M-8", "P-90", "R-21", "T-6", "W-118", "X-33", "Z-5")
DAYS = range(10, 29)
COUNTS = range(11, 990)
NAMES = ("Anchor", "Bracket", "Clamp", "Dowel", "Hinge", "Latch", "Pulley", "Rivet", "Screw", "Spring", "Washer")
SKU_PAIRS = {"sku": SKUS, "day": DAYS, "n": COUNTS}

MISTAKES = (
    Mistake(
        "ledger",
        "movement.day > until",
        "movement.day >= until",
        "until",
        "[test_until_includes_the_day|test_the_last_day_counts|test_movements_of_the_day_itself_count]",
        "balance(rows, until=date(2024, 3, <day>))",
        (
            'balance() with until leaves out the movements of that very day. The docstring says "up to and including".',
            "[We count at the end of the day|I ask for the stock of an evening], and balance(until=...) forgets what "
            "happened on the day itself.",
        ),
        (
            "balance() skips a movement if its day is `>=` until, so the day itself is left out.",
            "The comparison with until is off by one day: [`>=` skips the last day as well|it should skip later days "
            "only].",
        ),
        "Movements of the day `until` count",
        "`until` includes the day itself",
        ('rows = movements("2024-03-<day>,<sku>,<n>,")',),
        SKU_PAIRS,
    ),
    Mistake(
        "ledger",
        'sku=row["sku"].strip(),\n                quantity',
        'sku=row["sku"],\n                quantity',
        'row["sku"]',
        "[test_spaces_around_a_number_are_ignored|test_strips_the_sku_of_a_movement]",
        "balance(rows)",
        (
            "A movement with a space before or behind its sku is counted as another item.",
            "[Our export|The scanner] writes spaces around the sku, and then the balance has two entries for one item.",
        ),
        (
            "read_items strips the sku and read_movements does not.",
            "The sku of a movement is taken as it is, [spaces included|with its spaces], while that of an item is "
            "stripped.",
        ),
        "Spaces around the sku of a movement are ignored",
        "Movements may have spaces around the sku",
        ('rows = movements("2024-03-<day>, <sku> ,<n>,")',),
        SKU_PAIRS,
    ),
    Mistake(
        "ledger",
        'row.get("note") or ""',
        'row["note"] or ""',
        "note",
        "[test_files_without_notes|test_the_note_may_be_missing]",
        "rows[0].note",
        (
            "A movements file without the column note stops with <got>. [The column is optional|It used to work].",
            "[Older files|Files from the old till] have no column for notes, and reading them fails: <got>.",
        ),
        (
            'read_movements takes row["note"] for granted, and a file without that column has no such key.',
            "The note is looked up with brackets, which raises if there is no such column.",
        ),
        "The column note may be missing",
        "The column `note` is optional again",
        ('rows = list(read_movements(["day,sku,quantity", "2024-03-<day>,<sku>,<n>"]))',),
        SKU_PAIRS,
    ),
    Mistake(
        "ledger",
        'reorder_at=int(row["reorder_at"])',
        'reorder_at=int(row["reorder_quantity"])',
        "reorder_at",
        "[test_reads_the_threshold|test_reads_when_to_reorder]",
        'items["<sku>"].reorder_at',
        (
            "Items are listed far too early. reorder_at is <want> in the file, and read_items says <got>.",
            "read_items mixes up two columns: an item with reorder_at <want> has <got>.",
        ),
        (
            "read_items fills reorder_at from the column reorder_quantity.",
            "Both numbers of an item come from one column, reorder_quantity.",
        ),
        "reorder_at comes from its own column",
        "`reorder_at` is read from its own column",
        ('items = read_items(["sku,name,reorder_at,reorder_quantity", "<sku>,<name>,<low>,<n>"])',),
        {"sku": SKUS, "name": NAMES, "low": range(2, 10), "n": COUNTS},
    ),
    Mistake(
        "ledger",
        'reorder_quantity=int(row["reorder_quantity"])',
        'reorder_quantity=int(row["reorder_at"])',
        "reorder_quantity",
        "[test_reads_how_much_to_order|test_reads_the_quantity_to_order]",
        'items["<sku>"].reorder_quantity',
        (
            "We order too little: reorder_quantity of an item is <got>, and the file says <want>.",
            "read_items gives every item a reorder_quantity equal to its reorder_at, <got> instead of <want>.",
        ),
        (
            "read_items fills reorder_quantity from the column reorder_at.",
            "The quantity to order is read from the wrong column, [reorder_at|that of the threshold].",
        ),
        "reorder_quantity comes from its own column",
        "`reorder_quantity` is read from its own column",
        ('items = read_items(["sku,name,reorder_at,reorder_quantity", "<sku>,<name>,<low>,<n>"])',),
        {"sku": SKUS, "name": NAMES, "low": range(2, 10), "n": COUNTS},
    ),
    Mistake(
        "ledger",
        "items[item.sku] = item",
        "items.setdefault(item.sku, item)",
        "item.sku",
        "[test_the_last_line_of_an_item_counts|test_a_later_line_replaces_an_item]",
        'items["<sku>"].name',
        (
            "If an item is in the file twice, the first line wins. [The later one is the correction|It should be the "
            "last].",
            "We correct items by adding a line at the end, but read_items keeps the old one: <got> instead of <want>.",
        ),
        (
            "setdefault keeps what is there already, so a later line of the same item is lost.",
            "read_items uses setdefault, [which never replaces anything|so the first line of an item stays].",
        ),
        "The last line of an item counts",
        "A later line replaces an item",
        (
            'rows = ["<sku>,Old,1,2", "<sku>,<name>,1,2"]',
            'items = read_items(["sku,name,reorder_at,reorder_quantity", *rows])',
        ),
        {"sku": SKUS, "name": NAMES},
    ),
    Mistake(
        "ledger",
        "            continue\n",
        "            break\n",
        "until",
        "[test_days_may_be_in_any_order|test_until_needs_no_order]",
        "balance(rows, until=date(2024, 3, <day>))",
        (
            "balance(until=...) forgets movements if the file is not in the order of its days.",
            "A late entry at the end of the file is ignored by balance() when I ask for an earlier day.",
        ),
        (
            "balance() stops at the first movement that is too late, although earlier days may follow.",
            "There is a break where it should go on: [files need not be sorted|the rest of the file is never read].",
        ),
        "Movements behind one that is too late are counted",
        "`until` works for files in any order",
        ('rows = movements("2024-03-30,<sku>,4,", "2024-03-<day>,<sku>,<n>,")',),
        SKU_PAIRS,
    ),
    Mistake(
        "report",
        "left.get(item.sku, 0)",
        "left[item.sku]",
        "to_reorder",
        "[test_what_never_came_is_low|test_items_without_movements_are_low]",
        '[item.sku for item, _ in to_reorder(ITEMS, {"A-1": <n>})]',
        (
            "to_reorder stops with <got> if an item has no movements[ yet|].",
            "A new item that was never delivered breaks the report: <got>.",
        ),
        (
            "to_reorder looks every item up in left, and an item without movements is not there.",
            "left has only what was moved, so the lookup [fails for a new item|needs a default].",
        ),
        "Items without movements count as 0 pieces",
        "New items are in the report",
        (),
        {"n": range(101, 900)},
    ),
    Mistake(
        "report",
        "key=lambda pair: pair[0].name",
        "key=lambda pair: pair[0].sku",
        "sorted(",
        "[test_names_decide_the_order|test_is_sorted_by_name]",
        "to_reorder(items, {})[0][0].name",
        (
            "The report is sorted by number and not by name[, as the docstring says|].",
            "to_reorder should list items by name. I get <got>.",
        ),
        (
            "to_reorder sorts by the sku; the test has items for which both orders are the same.",
            "The key of the sort is the sku [instead of|, not] the name.",
        ),
        "The report is sorted by name",
        "The report is sorted by name again",
        ('items = {"A-3": Item("A-3", "Wire", 9, 9), "<sku>": Item("<sku>", "<name>", 9, 9)}',),
        {"sku": SKUS[2:], "name": NAMES[:-1]},
    ),
    Mistake(
        "report",
        "str(item.reorder_quantity)",
        "str(item.reorder_at)",
        "as_rows",
        "[test_rows_say_how_much_to_order|test_the_last_cell_is_the_quantity]",
        "as_rows([(BOLT, <n>)])[0][3]",
        (
            "The column order shows the threshold and not the quantity to order.",
            "In the report every item is to be ordered with its reorder_at: <got> bolts where it should be <want>.",
        ),
        (
            "as_rows puts reorder_at into the last cell.",
            "The last cell of a row is made from the wrong field, reorder_at.",
        ),
        "The column order has the quantity to order",
        "The column `order` shows the quantity to order",
        (),
        {"n": range(1, 99)},
    ),
    Mistake(
        "report",
        '"  ".join(cells).rstrip()',
        '"  ".join(cells)',
        "as_table",
        "[test_lines_have_no_spaces_at_the_end|test_no_trailing_spaces]",
        'as_table([("<sku>", "<name>", "<n>", "5")]).splitlines()[1]',
        (
            "The lines of the table end with spaces[, and our mail program shows them as garbage|].",
            "as_table leaves spaces at the end of each line. [Please remove them|They should go].",
        ),
        (
            "The last cell is padded like the others, and as_table does not strip the line.",
            "as_table pads every cell, [so a short last cell leaves spaces|the last one included].",
        ),
        "Lines of the table end with their last character",
        "The table has no spaces at the end of lines",
        (),
        {"sku": SKUS, "name": NAMES, "n": range(1, 99)},
    ),
    Mistake(
        "report",
        "key=lambda pair: (pair[1], pair[0].name)",
        "key=lambda pair: pair[0].name",
        "to_reorder",
        "[test_fewest_pieces_first|test_what_is_scarce_comes_first]",
        '[item.sku for item, _ in to_reorder(ITEMS, {"A-1": <n>, "A-2": <few>})]',
        (
            "Please sort the report by the pieces that are left, fewest first, and by name only where these are equal.",
            "Can the report begin with what is most urgent? [Fewest pieces first|The item with the fewest pieces at "
            "the top], then by name.",
        ),
        (
            "to_reorder sorts by the name alone. A pair has the item and the pieces, so both can be in the key.",
            "The order is made in one place, the key in to_reorder.",
        ),
        "The report begins with the fewest pieces",
        "The report is sorted by the pieces that are left",
        (),
        {"n": range(30, 99), "few": range(1, 29)},
    ),
)
