"""Measure the requested groups, and make the document of `apcbatch bench`.

Keys of the document: version, model, dtype, machine, limits (rates of the machine, per second), figures (in the order
of measurement; each has group, name, value, unit and its own details).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from apcbatch.bench import GROUPS, datasets, kernels, machine, passes, reuse
from apcbatch.bench.figures import Figure, Sizes
from apcbatch.config import Config
from apcbatch.engine.open import use_processor
from apcbatch.errors import UsageError
from apcbatch.model.families import load_model_config
from apcbatch.model.locate import locate_model
from apcbatch.model.own_dtype import with_own_dtype
from apcbatch.version import VERSION


def measure(
    config: Config,
    note: Callable[[str], None],
    groups: Collection[str] = GROUPS,
    input: str | None = None,
    sizes: Sizes | None = None,
) -> dict[str, Any]:
    """Measure the groups and return their figures as one document. note: called with a line for each figure as soon as
    it is measured.

    Without an INPUT, the group `run` is left out if all groups are requested; otherwise requesting it raises
    UsageError. Raises UsageError for a model or an INPUT that cannot be used.
    """
    if "run" in groups and set(groups) != set(GROUPS) and input is None:
        raise UsageError("the group run needs conversations; give --input FILE")
    use_processor(config)
    config = with_own_dtype(config, note)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    document: dict[str, Any] = {
        "version": VERSION,
        "model": config.model,
        "dtype": config.dtype,
        "machine": machine.describe(),
        "limits": machine.limits(dtype),
        "figures": [],
    }
    for figure in _figures(config, dtype, document["limits"], groups, input, sizes or Sizes()):
        document["figures"].append(figure.as_dict())
        note(f"{figure.name:<64} {figure.value:>12,.3f} {figure.unit}")
    return document


def _figures(
    config: Config,
    dtype: torch.dtype,
    limits: dict[str, float],
    groups: Collection[str],
    input: str | None,
    sizes: Sizes,
) -> Iterator[Figure]:
    if "kernels" in groups:
        model = load_model_config(locate_model(config.model))
        yield from kernels.Kernels(model, dtype, limits, sizes).figures()
    if "passes" in groups:
        yield from passes.figures(config, sizes)
    if "reuse" in groups:
        yield from reuse.figures(config, sizes)
    if "run" in groups and input is not None:
        yield from datasets.figures(config, input)
