"""Markdown tables and numbers as they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    rules = ["---", *["--:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, rules, *rows))


def number(value: float | None) -> str:
    """Three digits that count; nothing for None."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """A share as whole per cents; nothing for None."""
    return "" if share is None else f"{100 * share:.0f} %"
