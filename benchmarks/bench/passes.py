"""Measure prefill and decode of one model without a cache: rates, parts of the time.

A prefill rate is prompt tokens per second of wall time of a request that generates one token.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

from apcbatch.config import Config

from . import drafted_passes
from .figures import Figure, Sizes, median_s
from .parts import PRODUCTS, Parts
from .server import Server, serving

DECODE_PROMPT = 16
PARTS_REPEATS = 3
DECODE_PARTS = (1, 16, 32)


def figures(config: Config, sizes: Sizes) -> Iterator[Figure]:
    """Measure the rates of prefill and decode, their breakdown by part, and decode passes with drafts."""
    running = max(sizes.decode_running)
    with serving(config, "none", max_running=running, max_batch_tokens=sizes.long_tokens) as server:
        server.serve(server.prompts(1, sizes.suffix_tokens))
        for tokens in sizes.prefill_tokens:
            seconds = median_s(partial(_prefill, server, tokens), sizes)
            details = {"tokens": tokens, "seconds": seconds}
            yield Figure("prefill", f"prefill of {tokens}", tokens / seconds, "tokens/s", details)
        yield prefill_parts(server, sizes, f"parts of a prefill of {sizes.long_tokens}")
        for running in sizes.decode_running:
            yield _decode(server, running, sizes)
        for running in (r for r in DECODE_PARTS if r in sizes.decode_running):
            yield _decode_parts(server, running, sizes)
    yield from drafted_passes.figures(config, sizes)


def _prefill(server: Server, tokens: int) -> None:
    server.serve(server.prompts(1, tokens))


def _decode(server: Server, running: int, sizes: Sizes) -> Figure:
    rates: list[float] = []
    spent = 0.0
    while len(rates) < sizes.repeats and (len(rates) < 3 or spent < sizes.budget_s):
        prompts = server.prompts(running, DECODE_PROMPT)
        seconds = server.serve(prompts, 1 + sizes.new_tokens)
        spent += seconds["wall"]
        rates.append(running * sizes.new_tokens / seconds["decode"])
    rate = statistics.median(rates)
    return Figure("decode", f"decode, {running} running", rate, "tokens/s", {"running": running})


def prefill_parts(server: Server, sizes: Sizes, name: str) -> Figure:
    """Time the parts of a long prefill, PARTS_REPEATS times. Pending writes to a store finish before the next prefill
    begins."""
    runs = []
    for _ in range(PARTS_REPEATS):
        parts, prompts = Parts(), server.prompts(1, sizes.long_tokens)
        with parts.recording(server.engine.backend):
            total = server.serve(prompts)["wall"]
        server.engine.flush()
        runs.append((total, parts.of(total)))
    return _parts_figure(name, runs)


def _decode_parts(server: Server, running: int, sizes: Sizes) -> Figure:
    """Time the parts of decode alone: the difference between two runs with answers of different length."""
    runs = []
    for _ in range(PARTS_REPEATS):
        taken = []
        for new_tokens in (1, 1 + sizes.new_tokens):
            parts, prompts = Parts(), server.prompts(running, DECODE_PROMPT)
            with parts.recording(server.engine.backend):
                total = server.serve(prompts, new_tokens)["wall"]
            taken.append((total, parts.of(total)))
        (short_s, short), (long_s, long) = taken
        runs.append((long_s - short_s, {part: max(0.0, s - short.get(part, 0.0)) for part, s in long.items()}))
    return _parts_figure(f"parts of decode, {running} running", runs)


def _parts_figure(name: str, runs: list[tuple[float, dict[str, float]]]) -> Figure:
    """Return the share of matrix products in the run of median duration; the shares of all parts are in the details.
    runs: (seconds, seconds by part) of each."""
    total, parts = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
    shares = {part: seconds / total for part, seconds in parts.items()}
    details = {"seconds": total, "parts": shares}
    return Figure("parts", name, shares.get(PRODUCTS, 0.0), "of the time in products", details)
