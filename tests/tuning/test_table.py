"""Tables of any width: what does not fit is left out and named, and what is always needed stays."""

from __future__ import annotations

import pytest

from apcbatch.tuning.export.table import Table
from apcbatch.tuning.export.text import FORECAST_COLUMNS, TUNING_COLUMNS


@pytest.mark.parametrize("columns", [FORECAST_COLUMNS, TUNING_COLUMNS])
def test_each_width(columns) -> None:
    """Fault: a row is longer than the terminal, a column vanishes unsaid, or a wider terminal shows less."""
    before = set()
    for width in range(50, 140):
        table = Table(columns, width)
        assert len(table.head()) <= width
        values = {column.head: "1" for column in columns}
        assert len(table.row(values)) == len(table.head())
        shown = {column.head for column in columns} - set(table.left_out)
        assert before <= shown and {column.head for column in columns if not column.need} <= shown
        assert all(head in "".join(table.note()) for head in table.left_out)
        before = shown
    assert not Table(columns, None).left_out and not Table(columns, 200).note()
    assert Table(columns, None).head() == Table(columns, 200).head()
