"""Measure a model on this machine: kernels, prefill, decode, snapshots, restores, and with --input whole runs.

    python -m benchmarks.bench [--model DIR] [--dtype TYPE] [--only GROUP] [--input FILE [--limit N] [--max-tokens N]]

`make bench` runs it with the bundled model. Kernels are compared with the machine's own limits; a pass is broken down
by part; whole runs are measured cold, warm from disk and warm from RAM. Nothing is drafted but in the figures of decode
passes by their rows. Figures are medians, printed as they come. Run it on an idle machine.

The last line is the document: version, model, dtype, machine, limits (rates of the machine, per second), figures (in
the order of measurement; each has group, name, value, unit and its own details).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch

from apcbatch import resolution
from apcbatch.config import Config
from apcbatch.engine.parts import use_processor
from apcbatch.errors import ApcbatchError
from apcbatch.model.families import load_model_config
from apcbatch.model.locate import locate_model
from apcbatch.model.own_dtype import with_own_dtype
from apcbatch.version import VERSION

from . import datasets, kernels, machine, passes, reuse
from .figures import Figure, Sizes
from .products import product_shapes

GROUPS = ("kernels", "passes", "reuse", "run")  # of figures, in the order of measurement


def measure(config: Config, groups: Collection[str], input: str | None) -> dict[str, Any]:
    """Measure the groups and return their figures as one document; print each as soon as it is measured."""
    use_processor(config)
    config = with_own_dtype(config, lambda sentence: print(sentence, file=sys.stderr))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    document: dict[str, Any] = {
        "version": VERSION,
        "model": config.model,
        "dtype": config.dtype,
        "machine": machine.describe(),
        "limits": machine.limits(dtype),
        "figures": [],
    }
    for figure in _figures(config, dtype, document["limits"], groups, input):
        document["figures"].append(figure.as_dict())
        print(f"{figure.name:<64} {figure.value:>12,.3f} {figure.unit}", flush=True)
    return document


def _figures(
    config: Config, dtype: torch.dtype, limits: dict[str, float], groups: Collection[str], input: str | None
) -> Iterator[Figure]:
    sizes = Sizes()
    if "kernels" in groups:
        model = load_model_config(locate_model(config.model))
        yield from kernels.Kernels(model, product_shapes(config), dtype, limits, sizes).figures()
    if "passes" in groups:
        yield from passes.figures(config, sizes)
    if "reuse" in groups:
        yield from reuse.figures(config, sizes)
    if "run" in groups and input is not None:
        yield from datasets.figures(config, input)


def main() -> None:
    """Measure, and print the document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__.splitlines()[0])
    for flag in ("--model", "--dtype", "--limit", "--max-tokens"):
        parser.add_argument(flag, help="as of `apcbatch run`")
    parser.add_argument("--input", help="conversations of whole runs")
    parser.add_argument("--only", action="append", choices=GROUPS, help="a group of figures; default: all")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    input, only = given.pop("input", None), given.pop("only", [])
    if "run" in only and input is None:
        parser.error("the group run needs conversations; give --input FILE")
    try:
        print(json.dumps(measure(resolution.load(given, None), only or GROUPS, input)))
    except ApcbatchError as error:
        raise SystemExit(f"bench: {error}") from None


if __name__ == "__main__":
    main()
