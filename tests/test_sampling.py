"""The table of a request's settings: its bounds, and the options and fields of Request that read it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from apcbatch.config import OPTIONS
from apcbatch.sampling import SETTINGS, Bounds
from apcbatch.types import Request
from tests.effort import table


@table("bounds, text, inside, outside", [
    (Bounds(int), "an integer", (0, -(10**400), np.int64(3)), (0.0, True, "1", None)),
    (Bounds(int, 1, 4), "an integer from 1 to 4", (1, 4), (0, 5, 10**400)),
    (Bounds(int, 0), "an integer of at least 0", (0, 10**400), (-1, math.nan)),
    (Bounds(float, 0), "a number of at least 0", (0, 1.7e308, np.float64(1)), (math.nan, math.inf, 10**400, False)),
    (Bounds(float, 0, 1, above=True), "a number above 0 and up to 1", (5e-324, 1), (0, -1, 1.1, math.nan)),
    (Bounds(float, 1e-6, 1e6), "a number from 1e-06 to 1e+06", (1e-6, 1e6), (0, 2e6, "1")),
    (Bounds(int, -1, expected="-1 or more"), "-1 or more", (-1,), (-2,)),
])  # fmt: skip
def test_bounds_hold_and_say_what_they_hold(bounds: Bounds, text: str, inside: Any, outside: Any) -> None:
    """Fault: a bound that is one too wide, a NaN that passes, or a sentence that names another bound."""
    assert str(bounds) == text
    assert all(value in bounds for value in inside) and not any(value in bounds for value in outside)


def test_each_row_is_an_option_and_a_field_of_request_where_it_says_so() -> None:
    """Fault: a row that no option or no field of Request reads, so that a setting is taken and does nothing."""
    defaults = dataclasses.asdict(Request("", ()))
    for name, row in SETTINGS.items():
        assert (name in defaults) == row.in_request, name
        assert not row.in_request or defaults[name] == row.default, name
        assert not row.option_name or OPTIONS[row.option_name].help == row.help, name
