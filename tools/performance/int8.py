"""The page about products of 8-bit integers, from the documents of benchmarks/int8_products.py and int8_quality.py.

Must not know: how either was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from performance.tables import number, table

Document = dict[str, Any]
BEFORE = ("float32", "bfloat16")  # what the package has; other kinds are integers


def sections(machines: Sequence[Document], quality: Document) -> list[str]:
    """Headings, sentences and tables in order. machines: a document of products for each machine."""
    parts = [part for document in machines for part in _machine(document)]
    return [*parts, "## What rounding changes", _sentence(quality), _quality(quality)]


def _machine(document: Document) -> list[str]:
    machine = document["machine"]
    heading = f"## {machine['processor']}, {machine['threads']} threads"
    how = f"Milliseconds of one product, medians of {document['repeats']} in turns; kernels for {machine['isa']}."
    kinds = list(document["figures"][0]["ms"])
    integers = [kind for kind in kinds if kind not in BEFORE]
    rows = []
    for figure in document["figures"]:
        ms = figure["ms"]
        gain = ms["bfloat16"] / min(ms[kind] for kind in integers)
        name = f"{figure['product']}, {figure['in']} to {figure['out']}, {figure['rows']} rows"
        rows.append([name, *(number(ms[kind]) for kind in kinds), f"{gain:.2f}"])
    return [heading, how, table(["", *kinds, "bfloat16 over the faster int8"], rows)]


def _sentence(quality: Document) -> str:
    tokens = quality["models"][0]["tokens"]
    return (
        f"{tokens:,} tokens of the held-out conversations of `examples/agents.jsonl`: the mean log-probability of the "
        "next token (nats), and how often the likeliest token is float32's."
    )


def _quality(quality: Document) -> str:
    rows = []
    for model in quality["models"]:
        for variant, found in model["variants"].items():
            same = f"{100 * found['same_likeliest']:.1f} %"
            rows.append([f"{model['model']}, {variant}", f"{found['mean_logprob']:.4f}", same])
    return table(["", "mean log-probability", "same likeliest token"], rows)
