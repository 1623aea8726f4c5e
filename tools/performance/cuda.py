"""The page about whole models on a CUDA device, from the documents of benchmarks/cuda_model.py and cuda_vllm.py."""

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
        f"{1e-12 * document['bandwidth_bytes_s']:.2f} TB/s{_bus(document)}. Medians of {document['repeats']}, in "
        f"turns; measured in {document['seconds']:.0f} seconds. {other['engine']}: {other['how']}.",
        *(part for model in document["models"] for part in _model(model, other, bars, document["bandwidth_bytes_s"])),
        *_runs(document["runs"], other, bars),
    ]


def _bus(document: Document) -> str:
    """What the bus does, where that was measured."""
    if "bus_bytes_s" not in document:
        return ""
    to, out = (1e-9 * rate for rate in document["bus_bytes_s"])
    return f", pinned memory over the bus {number(to)} GB/s to the device and {number(out)} GB/s from it"


def _model(model: Document, other: Document, bars: Document, bandwidth: float) -> Iterator[str]:
    name = model["model"]
    yield f"## {name}, {model['dtype']}"
    if "note" in model:
        yield model["note"]
    rows = [
        _row(figure, other["models"].get(name, {}), bars.get(name, {}), bandwidth)
        for figure in model["figures"]
        if figure["unit"] not in ("times", "costs")
    ]
    yield table(["", "exact", "`--fast`", "exact takes, times", "at the limit", other["engine"], "bar"], rows)
    for figure in model["figures"]:
        if figure["unit"] == "times":
            yield f"A snapshot every 64 tokens makes a prefill of 2048 {figure['exact']:.3f} times as long."
        if figure["unit"] == "costs":
            yield _snapshots(figure)


def _snapshots(figure: Document) -> str:
    """What `tune-block-size` measures of snapshots."""
    names = ("keep_s", "restore_memory_s", "restore_disk_s", "write_s")
    keep, memory, disk, write = (f"{number(1e3 * figure[name])} ms" for name in names)
    return (
        f"A snapshot has {figure['bytes'] / 2**20:.1f} MiB. As `tune-block-size` measures it, one takes {keep} to "
        f"keep, {memory} to restore from memory and {disk} from disk (the page cache), in which time "
        f"{number(figure['break_even_tokens'])} tokens are computed. {write} of its writing are not hidden behind "
        "passes."
    )


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


def _runs(runs: list[Document], other: Document, bars: Document) -> Iterator[str]:
    """Whole runs, if any."""
    if not runs:
        return
    yield "## Whole runs"
    rounds = sorted({len(run["rounds_s"]) for run in runs})
    each = f"{rounds[0]} rounds" if len(rounds) == 1 else f"{rounds[0]} or {rounds[-1]} rounds, of two the faster one"
    yield (
        f"The first conversations of tau-bench: {runs[0]['requests']} requests, {runs[0]['prompt_tokens']:,} prompt "
        "tokens, 16 new tokens each, mamba-2.8b, `--max-batch-tokens 8192 --max-running 128 --pool-size 16GiB "
        "--store-size 40GiB`. *s* is without loading, the bar is "
        f"{bars['run']} s; *command* is all of it, Python's start and the loading of torch included. Each is "
        f"the median of {each}, and each run a process of its own. A warm store is the cold "
        f"one's, in the page cache. {other['engine']} takes {other['run']} s."
    )
    heads = ["", "s", "prefill s", "decode s", "store s", "loading s", "command s", "computed tokens", "restored"]
    heads += ["from disk"]
    rows = []
    for run in runs:
        spent, disk = run["seconds"], run["cached_by_source"]["disk"]
        shown = (spent["total"] - spent["load"], *(spent[name] for name in ("prefill", "decode", "store", "load")))
        row = [run["name"], *map(number, shown), number(run["command_s"]), f"{run['computed_tokens']:,}"]
        rows.append([*row, percent(run["hit_rate"]), percent(disk / run["prompt_tokens"])])
    yield table(heads, rows)
