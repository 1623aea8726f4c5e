"""Prompt tokens by turn of the conversation: how much of a growing history is computed again.

Must not know: traces, the page.
"""

from __future__ import annotations

from apcbatch.report.requests import Requests

MOST_TURNS = 100


def turn_sums(requests: Requests) -> dict[str, list[int]]:
    """Columns, a row each turn that was answered: requests, cached and computed tokens. Turns from the hundredth on are
    one row; requests that belong to no turn are left out."""
    sums: dict[int, list[int]] = {}
    columns = (requests.numbers[name] for name in ("turn", "cached", "computed", "error"))
    for turn, cached, computed, error in zip(*columns, strict=True):
        if turn and not error:
            row = sums.setdefault(min(turn, MOST_TURNS), [0, 0, 0])
            row[0] += 1
            row[1] += cached
            row[2] += computed
    turns = sorted(sums)
    named = {name: [sums[turn][n] for turn in turns] for n, name in enumerate(("requests", "cached", "computed"))}
    return {"turn": turns, **named}
