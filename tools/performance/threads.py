"""The section about a machine of many cores, from the document of benchmarks/threads.py. Must not know: other pages."""

from __future__ import annotations

from typing import Any

from performance.tables import number, percent, table

Document = dict[str, Any]


def sections(document: Document) -> list[str]:
    """Headings, sentences and tables in order."""
    machine, rates = document["machine"], document["rates"]
    threads = sorted({one["threads"] for one in rates})
    most = threads[-1]
    return [
        f"## Threads, on a machine of {most} cores",
        f"Machine: {machine['processor']}, kernels for {machine['isa']}, torch {machine['torch']}, Python "
        f"{machine['python']}. Tokens/s by the number of threads, and those of the most threads over those of the "
        "fewest; for bfloat16 also those of the most threads over float32's.",
        _rates(rates, threads),
        *(f"Left out: {what} ({why})." for what, why in document.get("left_out", {}).items()),
        f"Where the time of {most} threads goes, as shares of the wall time. What is left is outside the layers: the "
        "output projection, sampling and Python.",
        _parts([one for one in rates if one["threads"] == most]),
    ]


def _label(one: Document) -> str:
    return f"{one['model']} {one['dtype']}, {one['pass']}"


def _rates(rates: list[Document], threads: list[int]) -> str:
    found = {(_label(one), one["threads"]): one["tokens_per_s"] for one in rates}
    rows = []
    for label in dict.fromkeys(_label(one) for one in rates):
        values = [found.get((label, count)) for count in threads]
        few, many, float32 = values[0], values[-1], found.get((label.replace("bfloat16", "float32"), threads[-1]))
        gain = many / few if many and few else None
        over = many / float32 if many and float32 and "bfloat16" in label else None
        rows.append((label, *(number(value) for value in values), number(gain), number(over)))
    heads = ["", *map(str, threads), f"{threads[-1]} over {threads[0]}", "over float32"]
    return table(heads, sorted(rows))


def _parts(rates: list[Document]) -> str:
    names = list(dict.fromkeys(part for one in rates for part in one["parts"]))
    rows = [(_label(one), *(percent(one["parts"].get(name)) for name in names)) for one in rates]
    return table(["", *names], sorted(rows))
