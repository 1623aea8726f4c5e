"""Measure the cost of snapshots, of the store, of restores from RAM and disk, and of short packed suffixes.

The two sides of a ratio are measured alternately.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from apcbatch.config import Config
from apcbatch.types import RequestPlan

from .figures import Figure, Sizes, median_ratio
from .passes import prefill_parts
from .server import Prompt, Server, serving

GROUP = "reuse"
MANY_READS = 1 << 20


def figures(config: Config, sizes: Sizes) -> Iterator[Figure]:
    """Measure all figures, one after the other, and yield them."""
    with tempfile.TemporaryDirectory() as folder:
        grid = {"block_size": sizes.snapshot_every, "max_batch_tokens": sizes.long_tokens}
        with (
            serving(config, "planned", **grid) as plain,
            serving(config, "all", store=Path(folder) / "all", **grid) as storing,
        ):
            plain.serve(plain.prompts(1, sizes.suffix_tokens))
            storing.serve(storing.prompts(1, sizes.suffix_tokens))
            yield _snapshots(plain, sizes, ", in slots never used before")
            yield _storing(plain, storing, sizes)
            yield prefill_parts(storing, sizes, f"parts of a prefill of {sizes.long_tokens} with a store")
            yield _suffixes(plain, sizes)
            for tokens in sizes.prefill_tokens:
                yield _restored_first_token(plain, tokens, sizes)
            yield _from_memory(plain, sizes)
            pool_size = _pool_of_two_prompts(plain, sizes)
        yield _from_disk(config, Path(folder) / "restores", sizes)
    with serving(config, "planned", pool_size_bytes=pool_size, **grid) as full:
        for _ in range(2):
            _planned(full, full.prompts(1, sizes.long_tokens), _grid_plan(sizes))
        yield _snapshots(full, sizes, "")


def _planned(server: Server, prompts: list[Prompt], plan: RequestPlan) -> float:
    return server.serve(prompts, plan=plan)["wall"]


def _grid_plan(sizes: Sizes) -> RequestPlan:
    """Return a plan that keeps every boundary of the long prompt, each for one reader."""
    keep = tuple(range(sizes.snapshot_every, sizes.long_tokens, sizes.snapshot_every))
    return RequestPlan(keep=keep, reads=(1,) * len(keep))


def _pool_of_two_prompts(server: Server, sizes: Sizes) -> int:
    """Return a pool size that the snapshots of two long prompts fill, so that each new snapshot then evicts an older
    one."""
    footprint, snapshots = server.engine.footprint, sizes.long_tokens // sizes.snapshot_every
    return 2 * (snapshots * footprint.state_bytes + 2 * sizes.long_tokens * footprint.kv_token_bytes)


def _snapshots(plain: Server, sizes: Sizes, where: str) -> Figure:
    """Measure the ratio of two prefill times on one engine: with a plan that keeps every boundary, over a plan that
    keeps none. where: end of the figure's name."""
    tokens, every = sizes.long_tokens, sizes.snapshot_every
    ratio = median_ratio(
        lambda: _planned(plain, plain.prompts(1, tokens), _grid_plan(sizes)),
        lambda: _planned(plain, plain.prompts(1, tokens), RequestPlan()),
        sizes.repeats,
    )
    return Figure(GROUP, f"prefill of {tokens} with a snapshot every {every} over none{where}", ratio, "x", {})


def _storing(plain: Server, storing: Server, sizes: Sizes) -> Figure:
    """Measure the ratio of two prefill times: with writes to disk in the background, over without. Both sides keep the
    same snapshots."""

    def stored() -> float:
        seconds = storing.serve(storing.prompts(1, sizes.long_tokens))["wall"]
        storing.engine.flush()
        return seconds

    ratio = median_ratio(
        stored,
        lambda: _planned(plain, plain.prompts(1, sizes.long_tokens), _grid_plan(sizes)),
        sizes.repeats,
    )
    name = f"prefill of {sizes.long_tokens} with a store over without, a snapshot every {sizes.snapshot_every}"
    return Figure(GROUP, name, ratio, "x", {})


def _suffixes(plain: Server, sizes: Sizes) -> Figure:
    """Measure the ratio of two times per token: of many short suffixes after one restored prefix, over one long
    prompt."""
    [prefix] = plain.prompts(1, sizes.prefix_tokens)
    _planned(plain, [prefix], RequestPlan(keep=(len(prefix),), reads=(MANY_READS,)))
    resume = RequestPlan(resume_at=len(prefix), ideal=len(prefix))

    def packed() -> float:
        ends = plain.prompts(sizes.suffixes, sizes.suffix_tokens)
        return _planned(plain, [prefix + end for end in ends], resume) / (sizes.suffixes * sizes.suffix_tokens)

    def long() -> float:
        return _planned(plain, plain.prompts(1, sizes.long_tokens), RequestPlan()) / sizes.long_tokens

    ratio = median_ratio(packed, long, sizes.repeats)
    name = f"a token in {sizes.suffixes} restored prompts of {sizes.suffix_tokens} new over one of {sizes.long_tokens}"
    return Figure(GROUP, name, ratio, "x", {})


def _restored_first_token(plain: Server, tokens: int, sizes: Sizes) -> Figure:
    """Measure the time to the first token of a prompt that is restored from RAM up to its last token."""
    [prompt] = plain.prompts(1, tokens)
    end = tokens - 1
    _planned(plain, [prompt], RequestPlan(keep=(end,), reads=(MANY_READS,)))
    resume = RequestPlan(resume_at=end, ideal=end)
    seconds = statistics.median(_planned(plain, [prompt], resume) for _ in range(sizes.repeats))
    details = {"tokens": tokens, "seconds": seconds}
    return Figure(GROUP, f"first token of {tokens}, restored from RAM", 1e3 * seconds, "ms", details)


def _from_memory(plain: Server, sizes: Sizes) -> Figure:
    """Measure the time that a restore from RAM adds to a request of one token."""
    tokens = sizes.restored_tokens
    [prompt] = plain.prompts(1, tokens + 1)
    _planned(plain, [prompt], RequestPlan(keep=(tokens,), reads=(MANY_READS,)))
    resume = RequestPlan(resume_at=tokens, ideal=tokens)
    pairs = [
        (_planned(plain, [prompt], resume), _planned(plain, [prompt[:1]], RequestPlan()))
        for _ in range(4 * sizes.repeats)
    ]
    return _restore_figure(f"restore of {tokens} tokens from RAM", pairs)


def _from_disk(config: Config, folder: Path, sizes: Sizes) -> Figure:
    """Store a snapshot of each prompt with one engine, and measure one restore of each with another engine; the files
    are in the page cache."""
    tokens = sizes.restored_tokens
    with serving(config, "planned", store=folder, block_size=sizes.snapshot_every) as server:
        prompts = server.prompts(2 * sizes.repeats, tokens + 1)
        for prompt in prompts:
            _planned(server, [prompt], RequestPlan(keep_for_later=(tokens,)))
    pairs = []
    with serving(config, "planned", store=folder, block_size=sizes.snapshot_every) as server:
        resume = RequestPlan(resume_at=tokens, ideal=tokens)
        _planned(server, [prompts[0][:1]], RequestPlan())
        for prompt in prompts:
            restored = _planned(server, [prompt], resume)
            pairs.append((restored, _planned(server, [prompt[:1]], RequestPlan())))
        name = f"restore of {tokens} tokens from the page cache"
        figure = _restore_figure(name, pairs)
        figure.details["snapshots_read"] = server.engine.counters.snapshots_read
    return figure


def _restore_figure(name: str, pairs: list[tuple[float, float]]) -> Figure:
    """Return the figure of the milliseconds that a restore adds. pairs: (seconds of a request with a restore, seconds
    of one without)."""
    beyond = statistics.median(restored - plain for restored, plain in pairs)
    return Figure(GROUP, name, 1e3 * beyond, "ms beyond a request of one token", {"pairs": len(pairs)})
