"""The sections about apcbatch alone, from the document of benchmarks/measure.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from performance.tables import number, percent, table

Document = dict[str, Any]


def sections(document: Document) -> list[str]:
    """Headings, sentences and tables in order."""
    measured = document["measured"]
    return [
        *_machine(document),
        *_left_out(measured),
        "## Prefill and decode, tokens/s",
        _rates(measured),
        "Prefill is timed as the wall time of one request that asks for one token. Decode is timed over 16 tokens of "
        "each running sequence.",
        "![Seconds to the first token by the length of the prompt, computed and restored](../images/performance.svg)",
        "## Where the time goes",
        _parts(measured),
        "`python` is the rest: time outside every kernel and every named step.",
        "## Keeping and restoring",
        _joined(measured, lambda figure: figure["group"] == "reuse", number),
        *_runs(measured),
        "## Kernels against the machine's limit",
        "A kernel cannot be faster than its arithmetic at the rate of this machine's fastest product, nor than its "
        "bytes at the memory's bandwidth. The slower of the two is its limit, 100 %. Small products read their weights "
        "from memory; other data may come from a cache, and then a kernel exceeds 100 %.",
        *(part for one in measured for part in _kernels(one)),
    ]


def label(one: Document) -> str:
    """Model and dtype of a measurement."""
    return f"{one['model']} {one['dtype']}"


def _machine(document: Document) -> Iterable[str]:
    machine = document["measured"][0]["machine"]
    yield (
        f"Machine: {machine['processor']}, {machine['threads']} threads, kernels for {machine['isa']}, torch "
        f"{machine['torch']}, Python {machine['python']}. apcbatch {document['measured'][0]['version']}; measured in "
        f"{document['seconds'] / 60:.0f} minutes."
    )
    if "note" in document:
        yield document["note"]
    rows = [
        (label(one), *(number(1e-9 * one["limits"][name]) for name in one["limits"])) for one in document["measured"]
    ]
    heads = ["", "float32 GFLOP/s", "products of the dtype, GFLOP/s", "read GB/s", "copy GB/s"]
    yield table(heads, rows)


def _left_out(measured: list[Document]) -> list[str]:
    """What the documents lack, and why."""
    lines = [f"{label(one)}: {what} ({why})" for one in measured for what, why in one.get("left_out", {}).items()]
    return ["Left out: " + "; ".join(lines) + "."] if lines else []


def _rates(measured: list[Document]) -> str:
    names = _names(measured, lambda figure: figure["group"] in ("prefill", "decode") and figure["unit"] == "tokens/s")
    rows = [(label(one), *(number(_value(one, name)) for name in names)) for one in measured]
    return table(["", *names], rows)


def _parts(measured: list[Document]) -> str:
    """One column a pass, one row a part, in the order of the largest share anywhere."""
    passes = [(one, figure) for one in measured for figure in one["figures"] if figure["group"] == "parts"]
    largest: dict[str, float] = {}
    for _, figure in passes:
        for part, share in figure["parts"].items():
            largest[part] = max(share, largest.get(part, 0.0))
    parts = sorted((part for part in largest if largest[part] >= 0.005), key=lambda part: -largest[part])
    rows = [
        (
            f"{label(one)}, {figure['name'].removeprefix('parts of ')}",
            *(percent(figure["parts"].get(p)) for p in parts),
        )
        for one, figure in passes
    ]
    return table(["share of the wall time", *parts], rows)


def _joined(measured: list[Document], wanted: Any, shown: Any) -> str:
    """The figures of a kind, a row each, a column for each measurement."""
    units = {f["name"]: f["unit"] for one in measured for f in one["figures"] if wanted(f)}
    rows = [
        (f"{name} ({unit})" if unit != "x" else name, *(shown(_value(one, name)) for one in measured))
        for name, unit in units.items()
    ]
    return table(["", *map(label, measured)], rows)


def _runs(measured: list[Document]) -> Iterable[str]:
    rows = [
        (
            f"{label(one)}: {figure['name']}",
            number(figure["value"]),
            str(figure["requests"]),
            *(f"{figure[name]:,}" for name in ("prompt_tokens", "cached_tokens")),
            percent(figure["in_steps"]),
        )
        for one in measured
        for figure in one["figures"]
        if figure["group"] == "run"
    ]
    if rows:
        yield "## Whole runs over a slice of a dataset"
        yield table(["", "seconds", "requests", "prompt tokens", "restored", "in model steps"], rows)


def _kernels(one: Document) -> Iterable[str]:
    figures = [figure for figure in one["figures"] if figure["group"] == "kernels"]
    if figures:
        yield f"### {label(one)}"
        rows = [(f["name"], number(f["value"]), f["unit"], percent(f.get("of_limit"))) for f in figures]
        yield table(["kernel", "", "unit", "of its limit"], rows)


def _names(measured: list[Document], wanted: Any) -> list[str]:
    return list(dict.fromkeys(f["name"] for one in measured for f in one["figures"] if wanted(f)))


def _value(one: Document, name: str) -> float | None:
    return next((figure["value"] for figure in one["figures"] if figure["name"] == name), None)
