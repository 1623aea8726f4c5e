from datetime import date

import pytest
from stocktake.ledger import LedgerError, balance, read_items, read_movements

HEADER = "day,sku,quantity,note"


def movements(*rows):
    return list(read_movements([HEADER, *rows]))


def test_reads_items():
    items = read_items(["sku,name,reorder_at,reorder_quantity", "A-1, Bolt M8 ,100,500"])
    assert items["A-1"].name == "Bolt M8"


def test_adds_up():
    rows = movements("2024-03-01,A-1,500,delivery", "2024-03-04,A-1,-120,")
    assert balance(rows) == {"A-1": 380}


def test_until_a_day():
    rows = movements("2024-03-01,A-1,500,", "2024-03-04,A-1,-120,")
    assert balance(rows, until=date(2024, 3, 3)) == {"A-1": 500}


def test_names_the_line_of_a_bad_day():
    with pytest.raises(LedgerError, match="line 3"):
        movements("2024-03-01,A-1,5,", "yesterday,A-1,5,")
