"""Run passes before the first request, in slot 0 and the first KV pages: to warm up a device, and to measure."""

from __future__ import annotations

import math
import time

import numpy as np
import numpy.typing as npt
import torch

from apcbatch.engine.pool import NO_PAGES, Snapshot
from apcbatch.engine.sequence import Chunk, Sequence
from apcbatch.engine.snapshot_arrays import as_arrays, parts_of
from apcbatch.engine.step import DecodeBatches, Pass
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.pipeline import Model
from apcbatch.model.pipeline_arena import Arena
from apcbatch.store import Store
from apcbatch.types import Request

WARM_UP_TOKENS = 1024
WARM_UP_DRAFTS = (16, 64, 128, 256)  # rows
SHORT_PROMPT = 64  # tokens of the pass that says how many a measured one may have
MEASURED_S = 0.2  # of one measured pass
MEASURED_PASSES = 3


def warm_up(model: Model, arena: Arena, max_batch_tokens: int, num_pages: int | None, most_rows: int) -> None:
    """Run dummy passes: a prompt, then drafts of each size of WARM_UP_DRAFTS below 2 * most_rows. num_pages: KV pages
    of the arena; None for a model without attention. most_rows: maximum rows of a pass with drafts; 0 without drafts.
    Exceptions are ignored: later passes raise them again."""
    most = _most(WARM_UP_TOKENS, num_pages)
    count = min(max_batch_tokens, most)
    if count < 1:
        return
    _run(model, arena, np.zeros(count, np.int32), num_pages)
    for rows in WARM_UP_DRAFTS:  # the device's matrix products choose a kernel by the number of rows
        if rows // 2 < most_rows and rows <= most:
            _run(model, arena, np.zeros(1, np.int32), num_pages, rows - 1)


def measure_reading(
    model: Model, arena: Arena, store: Store, max_batch_tokens: int, num_pages: int | None, vocab_size: int
) -> int | None:
    """Measure the cost of reading a snapshot: return the number of tokens that prefill computes in that time, at least
    1. None if a pass, the write or the read fails.

    The snapshot has the KV of SHORT_PROMPT tokens: with any snapshot, the KV of its ancestors is read too. It is read
    from a file that was just written, and copied to its slot.
    """
    most, draws = _most(max_batch_tokens, num_pages), np.random.default_rng(0)

    def prefill_s(count: int) -> float:
        begin = time.perf_counter()
        done = _run(model, arena, draws.integers(vocab_size, size=count, dtype=np.int32), num_pages)
        return time.perf_counter() - begin if done else math.inf

    short = min(SHORT_PROMPT, most)
    if short < 1 or not math.isfinite(prefill_s(short)):  # the first pass of a size takes longer
        return None
    count = max(short, min(most, int(short * MEASURED_S / prefill_s(short))))
    token_s = min(prefill_s(count) for _ in range(MEASURED_PASSES)) / count
    pages = NO_PAGES if num_pages is None else np.arange(-(-short // PAGE_TOKENS))
    parts = parts_of(arena, Snapshot(b"", short, 0, pages), 0)
    read_s = store.time_reading(model.fingerprint, short, as_arrays(parts))
    if read_s is None or not math.isfinite(token_s):
        return None
    begin = time.perf_counter()
    if arena.layout.has_tokens:
        arena.scatter(torch.from_numpy(pages), 0, parts)
    arena.copy_in(0, parts).wait()
    return max(1, math.ceil((read_s + time.perf_counter() - begin) / token_s))


def _most(count: int, num_pages: int | None) -> int:
    """Return the tokens of a prompt that is to have `count`: fewer if the KV pages do not hold them."""
    return count if num_pages is None else min(count, num_pages * PAGE_TOKENS)


def _run(
    model: Model, arena: Arena, prompt: npt.NDArray[np.int32], num_pages: int | None, num_drafted: int = 0
) -> bool:
    """Run one pass over a prompt and drafted tokens. Return whether it succeeded."""
    length, rows = len(prompt), len(prompt) + num_drafted
    request = Request("", prompt, max_tokens=rows)
    sequence = Sequence(request, prompt, length, length, length + rows, slot=0)
    if num_pages is not None:
        sequence.pages = np.arange(-(-rows // PAGE_TOKENS))
    current = Pass(model, arena, DecodeBatches(), [Chunk(sequence, 0, length, draft=[0] * num_drafted)])
    if not current.failed:
        current.read()
    return not current.failed
