"""The table of keys: exact membership at a bounded number of bytes a key."""

from __future__ import annotations

import random

from apcbatch.job.keys import FIRST_SLOTS, EqualLines, KeyTable, UsedIds, id_key


def test_membership_and_values_are_exact_through_growth():
    """Fault: a key is lost or its value exchanged when the table grows or probes past the end; or a part of the key
    decides, so that one request stands in for another."""
    draw = random.Random(1)
    halves = [half << shift for half in range(1, 50) for shift in (0, 64)]  # the other half is 0
    keys = halves + [5 | 1 << 64] + [draw.getrandbits(96) or 1 for _ in range(20_000)]
    table = KeyTable()
    assert all(table.add(key, number) for number, key in enumerate(keys))
    assert not any(table.add(key, -1) for key in keys)
    assert len(table) == len(keys)
    assert [table.get(key) for key in keys] == list(range(len(keys)))
    assert not any(draw.getrandbits(96) in table for _ in range(5_000)) and 5 | 2 << 64 not in table


def test_a_search_goes_on_at_the_first_slot():
    """Fault: keys that belong into the last slot of the table are looked for beyond it."""
    table = KeyTable()
    last = [FIRST_SLOTS - 1 + number * FIRST_SLOTS for number in range(5)]
    assert all(table.add(key, number) for number, key in enumerate(last))
    assert [table.get(key) for key in last] == list(range(5)) and FIRST_SLOTS - 1 + 9 * FIRST_SLOTS not in table


def test_a_value_can_be_replaced():
    """Fault: a mark on one request falls on another, or is lost."""
    table = KeyTable()
    for key in range(1, 3000):
        table.add(key, key)
    for key in range(1, 3000, 2):
        table.set(key, ~key)
    assert sorted(table.values()) == sorted(~key if key % 2 else key for key in range(1, 3000))


def test_a_request_takes_at_most_32_bytes():
    """Fault: resident memory grows by Python objects for each finished request. A resumed run has two tables, of what
    is answered and of the ids: 16 to 64 bytes a request together."""
    table = KeyTable()
    for turn in range(50_000):
        table.add(id_key(f"c-1#{turn}"), turn)
        if turn > 1000:
            assert table.num_bytes <= 32 * len(table)
    assert table.num_bytes >= 16 * len(table)


def test_equal_lines_are_counted_whatever_the_order_of_their_keys():
    """Fault: equal lines draw the same answer, or one whose keys stand in another order counts as a new one."""
    lines = EqualLines()
    one, same, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}, {"a": 1, "b": {"c": 2}}
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    records = ((one, "x"), (same, "y"), (other, "x"), (one, "x"), (other, "z"), (same, "y"))
    found = [lines.add(*record) for record in (*records, (None, "x"), (deep, "x"), (deep, "y"))]
    assert [count for _, count in found] == [0, 1, 0, 2, 1, 3, 0, 1, 0], "by their bytes where they are no JSON"
    assert len({digest for digest, _ in found}) == 4 and {len(digest) for digest, _ in found} == {24}


def test_an_id_that_was_used_names_its_first_line():
    """Fault: an id is refused at its first use, or another line is named than the one that has it."""
    ids = UsedIds()
    assert ids.add("a", 3) is None and ids.add("b", 4) is None
    for line in (5, 6):
        error = ids.add("a", line)
        assert (error.code, error.message) == ("duplicate_id", "id 'a' was used by line 3; expected each id once")
