"""What one draw is: a model, a dataset, generation settings, and the ways in which it is run beside the cold one.

Everything comes from the seed, but for which instruction sets this processor has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from apcbatch.types import DRAFT_SOURCES
from tests.model.quantized import FORMATS
from tests.soak.conversations import Dataset
from tests.soak.settings import run_settings
from tests.tiny import FAMILIES

BLOCK_SIZES = (1, 7, 16, 48, 64, 100, 544)
BUDGETS = (7, 33, 100, 512, 2048, 8192)
STORE_SIZES = ("0", "30KiB", "400KiB", "20GiB")
WRITE_DELAYS = (0.0, 0.0, 0.01, 0.1)
POOLS = ("least", "small", "ample")
DRAFT_MEMORIES = ("0", "1", "1500", "9KiB", "100KiB", "")  # the last is the default
COLD = "cold.jsonl"
WRONG_ANSWERS = "wrong-answers.jsonl"  # the cold run's OUT with some tokens of its answers changed
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
    """SIGKILL when this share of the lines that are left is written, and that number of seconds later."""

    share: float
    seconds: float


@dataclass(frozen=True)
class Way:
    """A run. torn: OUT is cut at `cut` of its bytes and resumed. killed: a process is killed at each of `kills`, and
    each time the next part continues. damage: a file of the store is spoilt before. holds_plan: pool and order hold the
    plan, so that the same run without drafts has the same hits and misses."""

    parts: list[Part]
    ending: Ending = "whole"
    kills: list[Kill] = field(default_factory=list)
    cut: float = 1.0
    damage: bool = False
    holds_plan: bool = False


@dataclass(frozen=True)
class Draw:
    """All of it."""

    seed: int
    family: str
    weights_seed: int
    form: str  # of tests.model.quantized.FORMATS; empty: not quantised
    dtype: str
    isa_rank: float
    lines: list[str]
    generation: dict[str, str]
    ways: list[Way]


def make_draw(seed: int, kill: bool) -> Draw:
    """The draw of a seed; kill: a way with SIGKILL goes before the others."""
    draw = np.random.default_rng(seed)
    family = _one(draw, *FAMILIES)
    dtype = _one(draw, "float32", "bfloat16")
    weights_seed, isa_rank = int(draw.integers(3)), float(draw.random())
    form = _one(draw, *FORMATS) if draw.random() < 0.5 else ""
    generation = {
        "turns": _one(draw, "each", "each", "last", "rollout"),
        "max_tokens": _one(draw, 1, 2, 9, 24, 60),
        "temperature": _one(draw, 0, 0, 0.8, 2),
        "top_p": _one(draw, 1, 0.9),
        "seed": str(draw.integers(1000)),
        **(run_settings(draw) if draw.random() < 0.5 else {}),
    }
    lines = Dataset(draw).lines()
    make = _Maker(draw, is_rollout=generation["turns"] == "rollout")
    ways = [make.killed()] if kill else []
    for _ in range(int(draw.integers(2, 5))):
        make.num_earlier = len(ways)
        ways.append(make.torn() if draw.random() < 0.25 else make.whole())
    return Draw(seed, family, weights_seed, form, dtype, isa_rank, lines, generation, ways)


def out_of(number: int) -> str:
    """Name of the OUT of a way."""
    return f"way-{number}.jsonl"


class _Maker:
    """Maker of a draw's ways. num_earlier: ways whose OUT there is, for --draft-from."""

    def __init__(self, draw: np.random.Generator, is_rollout: bool) -> None:
        self._draw, self._is_rollout = draw, is_rollout
        self.num_earlier = 0

    def whole(self) -> Way:
        if not self._is_rollout and self._draw.random() < 0.2:
            part = self._part(store="")
            planned = {"policy": "planned", "window_tokens": "16777216"}
            return Way([replace(part, options={**part.options, **planned}, pool="ample")], holds_plan=True)
        return Way([self._part()], damage=bool(self._draw.random() < 0.2))

    def torn(self) -> Way:
        return Way([self._part(), self._part()], "torn", cut=float(self._draw.random()))

    def killed(self) -> Way:
        """Each part has options of its own, but all share a store, so that each finds what the killed one left."""
        draw = self._draw
        kills = [Kill(float(draw.random()), float(draw.random()) * 0.02) for _ in range(int(draw.integers(1, 3)))]
        parts = [self._part(store="states-0") for _ in range(len(kills) + 1)]
        return Way(parts, "killed", kills)

    def _part(self, store: str | None = None) -> Part:
        draw = self._draw
        options: dict[str, Any] = {
            "policy": str(draw.choice(["planned", "all", "last", "none"], p=[0.45, 0.35, 0.15, 0.05])),
            "block_size": _one(draw, *BLOCK_SIZES),
            "min_gain_tokens": _one(draw, 1, 16, 64),
            "weights": _one(draw, "auto", "encoded", "decoded"),
            "max_batch_tokens": _one(draw, *BUDGETS),
            "max_running": _one(draw, 1, 2, 3, 8, 32),
            "order": _one(draw, "auto", "file"),
            "window_tokens": _one(draw, 1, 500, 3000, 1 << 24),
        }
        store = _one(draw, "", "states-0", "states-0", "states-1") if store is None else store
        if store:
            options |= {"store": store, "store_size": str(draw.choice(STORE_SIZES, p=[0.1, 0.15, 0.15, 0.6]))}
        if draw.random() < 0.3:
            options["ordered"] = ""
        return Part(
            {name: str(value) for name, value in (options | self._drafts()).items()},
            str(draw.choice(POOLS, p=[0.25, 0.25, 0.5])),
            int(draw.integers(1, 3)),
            float(draw.random()),
            float(draw.choice(WRITE_DELAYS)),
        )

    def _drafts(self) -> dict[str, str]:
        """Options of the drafts: none, auto or some sources, with the OUT of the cold run, as it is or with
        wrong tokens, or of an earlier way."""
        draw, options = self._draw, {}
        if draw.random() < 0.1:
            return {"draft": "none"}
        if draw.random() < 0.5:
            options["draft_from"] = _one(
                draw, COLD, WRONG_ANSWERS, WRONG_ANSWERS, *map(out_of, range(self.num_earlier))
            )
        if draw.random() < 0.5:
            applies = {"previous": "draft_from" in options, "recorded": not self._is_rollout}
            known = [source for source in DRAFT_SOURCES if applies.get(source, True)]
            count = int(draw.integers(1, len(known) + 1))
            options["draft"] = ",".join(known[int(place)] for place in draw.permutation(len(known))[:count])
        memory = _one(draw, *DRAFT_MEMORIES)
        return options | ({"draft_memory": memory} if memory else {})


def _one(draw: np.random.Generator, *choices: Any) -> str:
    return str(choices[int(draw.integers(len(choices)))])
