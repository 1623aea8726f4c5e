"""Measure the time of a decode pass by its number of rows: due tokens plus drafted tokens.

The drafted tokens are random, the same number for each sequence; the engine's draft budget (drafting.py) is switched
off. Nearly all of them are rejected, so after a pass the CPU replays only the due token of each sequence; an accepted
token would be replayed too.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from apcbatch.config import Config
from apcbatch.drafts.drafter import Draft
from apcbatch.engine.drafting import MOST_DRAFTED, Drafting
from apcbatch.engine.row_costs import RowCosts
from apcbatch.prefix import TokenArray
from apcbatch.types import Request

from .figures import Figure, Sizes
from .server import Server, serving

GROUP = "rows"
PROMPT = 16
WARM_UP = 2  # passes
PASSES = 4  # per repeat


class FixedDrafts:
    """Stand-in for a draft index: `count` random tokens for every answer."""

    held_bytes = 0

    def __init__(self, vocab_size: int) -> None:
        self.count = 0
        self._vocab_size, self._random = vocab_size, random.Random(0)

    def begin(
        self, prompt: TokenArray, references: Mapping[str, Sequence[TokenArray]], most_tokens: int
    ) -> FixedDrafts:
        return self

    def add(self, tokens: TokenArray, num_prompt: int, begin: int) -> None:
        """Learn nothing."""

    def append(self, tokens: Sequence[int]) -> None:
        """Ignore the answer."""

    def propose(self, most: int) -> Draft | None:
        count = min(most, self.count)
        if not count:
            return None
        return Draft([self._random.randrange(self._vocab_size) for _ in range(count)], [1.0] * count, "lookup")


class NoCosts(RowCosts):
    """RowCosts without a cost for further rows, so that every drafted token is verified."""

    def add(self, rows: int, seconds: float) -> None:
        """Measure nothing."""

    def __bool__(self) -> bool:
        return True

    def knows(self, rows: int) -> bool:
        """Return True, so that no pass is left without drafts."""
        return True

    def of(self, rows: int) -> float:
        return 1.0


def figures(config: Config, sizes: Sizes) -> Iterator[Figure]:
    """Measure a decode pass for each number of sequences in draft_running and each multiple of it in draft_rows, up to
    MOST_DRAFTED rows per sequence."""
    most = max(sizes.draft_running)  # max_running = 2 * most allows four drafted tokens for each sequence
    with serving(config, "none", max_running=2 * most, draft=("lookup",)) as server:
        drafts = FixedDrafts(server.engine.vocab_size)
        install(server.engine._drafting, drafts)
        for running in sizes.draft_running:
            for rows in sizes.draft_rows:
                if rows % running == 0 and rows // running <= MOST_DRAFTED:
                    drafts.count = rows // running - 1
                    figure = _figure(server, running, rows, sizes)
                    if figure is not None:
                        yield figure


def install(drafting: Drafting, drafts: FixedDrafts) -> None:
    """Replace an engine's draft index, and switch its draft budget off."""
    drafting._drafts = drafts  # type: ignore[assignment]
    drafting._costs = drafting._plain_costs = NoCosts()


def _figure(server: Server, running: int, rows: int, sizes: Sizes) -> Figure | None:
    """Measure passes of one size. Return None if the engine cannot verify this many drafted tokens in a pass."""
    taken: list[float] = []
    begin = time.perf_counter()
    for repeat in range(sizes.repeats):
        if repeat >= 3 and time.perf_counter() - begin > sizes.budget_s:
            break
        seconds, verified = _passes(server, running, rows)
        if verified != rows - running:
            return None
        taken += seconds
    seconds_of_one = statistics.median(taken)
    details = {"running": running, "rows": rows, "seconds": seconds_of_one}
    return Figure(
        GROUP, f"decode pass, {running} running, {rows} row{'s' * (rows != 1)}", 1e3 * seconds_of_one, "ms", details
    )


def _passes(server: Server, running: int, rows: int) -> tuple[list[float], int]:
    """Run some passes with all sequences. Return the seconds of each, and the largest number of drafted tokens in a
    pass."""
    engine = server.engine
    most_tokens = (WARM_UP + PASSES + 1) * (rows // running) + 4  # no answer ends, even if all are accepted
    for number, prompt in enumerate(server.prompts(running, PROMPT)):
        engine.submit(Request(f"rows-{number}", prompt, max_tokens=most_tokens, ignore_eos=True))
    num_prefilled = engine.counters.prefill_tokens + running * PROMPT
    while engine.counters.prefill_tokens < num_prefilled:
        engine.step()
    seconds, verified = [], 0
    for number in range(WARM_UP + PASSES):
        before = engine.counters.copy()
        engine.step()
        after = engine.counters
        if number >= WARM_UP:
            seconds.append(after.seconds["decode"] - before.seconds["decode"])
            verified = max(verified, _drafted(after.drafts) - _drafted(before.drafts))
    engine.abort()
    return seconds, verified


def _drafted(drafts: Mapping[str, Any]) -> int:
    return sum(drafted for drafted, _ in drafts.values())
