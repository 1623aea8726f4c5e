from stocktake.models import Item
from stocktake.report import as_rows, as_table, to_reorder

BOLT = Item("A-1", "Bolt M8", reorder_at=100, reorder_quantity=500)
NUT = Item("A-2", "Nut M8", reorder_at=50, reorder_quantity=300)
ITEMS = {item.sku: item for item in (NUT, BOLT)}


def test_lists_what_is_low_by_name():
    assert [item.sku for item, _ in to_reorder(ITEMS, {"A-1": 3, "A-2": 7})] == ["A-1", "A-2"]


def test_leaves_out_what_there_is():
    assert to_reorder(ITEMS, {"A-1": 101, "A-2": 700}) == []


def test_table_has_a_header():
    table = as_table(as_rows([(BOLT, 3)]))
    assert table.splitlines()[0].split() == ["sku", "name", "left", "order"]
