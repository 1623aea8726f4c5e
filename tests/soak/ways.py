"""What one draw is: a model, a dataset, generation settings, and the ways in which it is run beside the cold one.

Everything comes from the seed, but for which instruction sets this processor has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tests.soak.conversations import Dataset

BLOCK_SIZES = (1, 7, 16, 48, 64, 100, 544)
BUDGETS = (7, 33, 100, 512, 2048, 8192)
STORE_SIZES = ("0", "30KiB", "400KiB", "20GiB")
WRITE_DELAYS = (0.0, 0.0, 0.01, 0.1)
POOLS = ("least", "small", "ample")
Ending = Literal["whole", "torn", "killed"]


@dataclass(frozen=True)
class Part:
    """One process's share of a way: options of `run`, the pool by name, threads, the instruction set by rank, and
    seconds that the store waits before each of its writes, but where the process is killed."""

    options: dict[str, str]
    pool: str
    threads: int
    isa_rank: float
    write_delay: float


@dataclass(frozen=True)
class Kill:
    """SIGKILL when this share of the lines that are left is written, and so many seconds later."""

    share: float
    seconds: float


@dataclass(frozen=True)
class Way:
    """A run. torn: OUT is cut at `cut` of its bytes and resumed. killed: a process is killed at each of `kills`, and
    each time the next part goes on. damage: a file of the store is spoilt before."""

    parts: list[Part]
    ending: Ending = "whole"
    kills: list[Kill] = field(default_factory=list)
    cut: float = 1.0
    damage: bool = False


@dataclass(frozen=True)
class Draw:
    """All of it."""

    seed: int
    family: str
    weights_seed: int
    dtype: str
    isa_rank: float
    lines: list[str]
    generation: dict[str, str]
    ways: list[Way]


def make_draw(seed: int, kill: bool) -> Draw:
    """The draw of a seed; kill: a way with SIGKILL goes before the others."""
    draw = np.random.default_rng(seed)
    family, dtype = _one(draw, "mamba", "falcon_mamba", "jamba"), _one(draw, "float32", "bfloat16")
    weights_seed, isa_rank = int(draw.integers(3)), float(draw.random())
    generation = {
        "turns": _one(draw, "each", "each", "last", "rollout"),
        "max_tokens": _one(draw, 1, 2, 9, 24),
        "temperature": _one(draw, 0, 0, 0.8, 2),
        "top_p": _one(draw, 1, 0.9),
        "seed": str(draw.integers(1000)),
    }
    lines = Dataset(draw).lines()
    ways = [_killed(draw)] if kill else []
    for _ in range(int(draw.integers(2, 5))):
        ways.append(_torn(draw) if draw.random() < 0.25 else _whole(draw))
    return Draw(seed, family, weights_seed, dtype, isa_rank, lines, generation, ways)


def _whole(draw: np.random.Generator) -> Way:
    return Way([_part(draw)], damage=bool(draw.random() < 0.2))


def _torn(draw: np.random.Generator) -> Way:
    return Way([_part(draw), _part(draw)], "torn", cut=float(draw.random()))


def _killed(draw: np.random.Generator) -> Way:
    """Each part has options of its own, but all share a store, so that each finds what the killed one left."""
    kills = [Kill(float(draw.random()), float(draw.random()) * 0.02) for _ in range(int(draw.integers(1, 3)))]
    parts = [_part(draw, store="states-0") for _ in range(len(kills) + 1)]
    return Way(parts, "killed", kills)


def _part(draw: np.random.Generator, store: str | None = None) -> Part:
    options: dict[str, Any] = {
        "policy": str(draw.choice(["planned", "all", "last", "none"], p=[0.45, 0.35, 0.15, 0.05])),
        "block_size": _one(draw, *BLOCK_SIZES),
        "min_gain_tokens": _one(draw, 1, 16, 64),
        "max_batch_tokens": _one(draw, *BUDGETS),
        "max_running": _one(draw, 1, 2, 3, 8, 32),
        "order": _one(draw, "auto", "file"),
        "window": _one(draw, 1, 2, 5, 512),
    }
    store = store or _one(draw, "", "states-0", "states-0", "states-1")
    if store:
        options |= {"store": store, "store_size": str(draw.choice(STORE_SIZES, p=[0.1, 0.15, 0.15, 0.6]))}
    if draw.random() < 0.3:
        options["ordered"] = ""
    return Part(
        {name: str(value) for name, value in options.items()},
        str(draw.choice(POOLS, p=[0.25, 0.25, 0.5])),
        int(draw.integers(1, 3)),
        float(draw.random()),
        float(draw.choice(WRITE_DELAYS)),
    )


def _one(draw: np.random.Generator, *choices: Any) -> str:
    return str(choices[int(draw.integers(len(choices)))])
