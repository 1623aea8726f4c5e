"""The section about a machine of many cores, from the document of benchmarks/threads.py."""

from __future__ import annotations

from typing import Any

from performance.tables import number, percent, table

Document = dict[str, Any]

_MEMORY = (
    "Memory is what the steps need at least, each weight once and the states read and written, without activations and "
    "KV; beside it as a share of the {} GB/s at which the same threads read 256 MiB, some of which may lie in a cache."
)


def sections(document: Document) -> list[str]:
    """Headings, sentences and tables in order."""
    machine, rates = document["machine"], document["rates"]
    threads = sorted({one["threads"] for one in rates})
    most = threads[-1]
    reads = document.get("read_bytes_per_s", {}).get(str(most))
    told = ["Tokens/s by the number of threads"]
    if len(threads) > 1:
        told.append("those of the most threads over those of the fewest")
    if any("before" in one for one in rates):
        told.append(f"those of {most} threads before {document['change']}, and the gain")
    told.append("for bfloat16 also those of the most threads over float32's")
    left = "Python" if any("sampling" in one["parts"] for one in rates) else "sampling and Python"
    return [
        f"## Threads, on a machine of {most} cores",
        f"Machine: {machine['processor']}, kernels for {machine['isa']}, torch {machine['torch']}, Python "
        f"{machine['python']}. {'; '.join(told)}.",
        _rates(rates, threads),
        *(f"Left out: {what} ({why})." for what, why in document.get("left_out", {}).items()),
        f"Where the time of {most} threads goes, as shares of the wall time. What is left is outside the layers: "
        f"{left}. Waiting is in the other columns: that of all threads for the last one of each kernel, as a mean over "
        "them." + (f" {_MEMORY.format(number(reads / 1e9))}" if reads else ""),
        _parts([one for one in rates if one["threads"] == most], reads),
    ]


def _label(one: Document) -> str:
    return f"{one['model']} {one['dtype']}, {one['pass']}"


def _rates(rates: list[Document], threads: list[int]) -> str:
    found = {(_label(one), one["threads"]): one["tokens_per_s"] for one in rates}
    before = {_label(one): one["before"] for one in rates if one["threads"] == threads[-1] and "before" in one}
    rows = []
    for label in dict.fromkeys(_label(one) for one in rates):
        values = [found.get((label, count)) for count in threads]
        few, many, float32 = values[0], values[-1], found.get((label.replace("bfloat16", "float32"), threads[-1]))
        row = [label, *(number(value) for value in values)]
        if len(threads) > 1:
            row.append(number(_over(many, few)))
        if before:
            row += [number(before.get(label)), number(_over(many, before.get(label)))]
        rows.append((*row, number(_over(many, float32) if "bfloat16" in label else None)))
    heads = ["", *map(str, threads)]
    heads += [f"{threads[-1]} over {threads[0]}"] if len(threads) > 1 else []
    heads += ["before", "gain"] if before else []
    return table([*heads, "over float32"], sorted(rows))


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _parts(rates: list[Document], reads: float | None) -> str:
    names = list(dict.fromkeys(part for one in rates for part in one["parts"]))
    rows = []
    for one in rates:
        row = [_label(one), *(percent(one["parts"].get(name)) for name in names)]
        if reads:
            needed = one.get("bytes_per_s")
            row += [number(needed / 1e9 if needed else None), percent(needed / reads if needed else None)]
        rows.append(tuple(row))
    return table(["", *names, *(["memory, GB/s", "of what is read"] if reads else [])], sorted(rows))
