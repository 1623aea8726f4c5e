"""The page about whole models on a CUDA device, from the documents of benchmarks/cuda_model.py and cuda_vllm.py.

Must not know: how either was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from performance.tables import number, percent, table

Document = dict[str, Any]
UNITS = {"prefill": (1e-3, "k tokens/s"), "decode": (1e3, "ms a step"), "loading": (1.0, "s")}


def sections(document: Document, other: Document, bars: Document) -> list[str]:
    """Headings, sentences and tables in order. other: the document of another engine. bars: what was aimed for, by
    model and figure."""
    return [
        f"Device: {document['device']}, torch {document['torch']}; apcbatch {document['version']}. A copy moves "
        f"{1e-12 * document['bandwidth_bytes_s']:.2f} TB/s. Medians of {document['repeats']}, in turns; measured in "
        f"{document['seconds']:.0f} seconds. {other['engine']}: {other['how']}.",
        *(part for model in document["models"] for part in _model(model, other, bars, document["bandwidth_bytes_s"])),
        *_runs(document["runs"], other),
    ]


def _model(model: Document, other: Document, bars: Document, bandwidth: float) -> Iterator[str]:
    name = model["model"]
    yield f"## {name}, {model['dtype']}"
    if "note" in model:
        yield model["note"]
    rows = [
        _row(figure, other["models"].get(name, {}), bars.get(name, {}), bandwidth)
        for figure in model["figures"]
        if figure["unit"] != "times"
    ]
    yield table(["", "exact", "`--fast`", "exact takes, times", "at the limit", other["engine"], "bar"], rows)
    for figure in model["figures"]:
        if figure["unit"] == "times":
            yield f"A snapshot every 64 tokens makes a prefill of 2048 {figure['exact']:.3f} times as long."


def _row(figure: Document, theirs: dict[str, float], bars: dict[str, float], bandwidth: float) -> list[str]:
    """The limit of a prefill is its matrix products alone, that of a step the weights' bytes at the rate of a copy."""
    name = figure["name"]
    kind = name.split()[0]
    scale, unit = UNITS[kind]
    longer = figure["fast"] / figure["exact"] if kind == "prefill" else figure["exact"] / figure["fast"]
    limit = None
    if kind == "prefill":
        limit = figure["exact"] / figure["products"]
    elif kind == "decode":
        limit = figure["bytes"] / bandwidth / figure["exact"]
    shown = [
        "" if value is None else number(scale * value)
        for value in (figure["exact"], figure["fast"], theirs.get(name), bars.get(name))
    ]
    return [f"{name}, {unit}", *shown[:2], f"{longer:.2f}", percent(limit), *shown[2:]]


def _runs(runs: list[Document], other: Document) -> Iterator[str]:
    """Whole runs, if any."""
    if not runs:
        return
    yield "## Whole runs"
    yield (
        f"The first conversations of tau-bench: {runs[0]['requests']} requests, {runs[0]['prompt_tokens']:,} prompt "
        "tokens, 16 new tokens each, mamba-2.8b, `--max-batch-tokens 8192 --pool-size 16GiB`. Seconds without loading; "
        f"{other['engine']} takes {other['run']} s."
    )
    heads = ["", "s", "prefill s", "decode s", "loading s", "computed tokens", "restored"]
    rows = []
    for run in runs:
        spent = run["seconds"]
        shown = (spent["total"] - spent["load"], spent["prefill"], spent["decode"], spent["load"])
        rows.append(
            [run["name"], *map(number, shown), f"{run['computed_tokens']:,}", percent(run["hit_rate"])]
        )  # fmt: skip
    yield table(heads, rows)
