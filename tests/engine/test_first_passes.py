"""Passes before the first request: those of a device, and those that measure what reading a snapshot costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apcbatch import Engine, Request
from apcbatch.engine import first_passes
from apcbatch.engine.first_passes import measure_reading, warm_up
from apcbatch.engine.parts import EngineOptions, open_parts
from tests.effort import table
from tests.engine.opened import OpenedEngine


@pytest.mark.parametrize(
    ("family", "max_batch_tokens"), [("mamba", 1), ("mamba", 4096), ("jamba", 40), ("jamba", 4096)]
)
def test_no_answer_changes(
    family: str, max_batch_tokens: int, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a pass that cannot be begun, one that needs more pages than there are, and states or keys that it leaves
    for those who come."""
    folder, requests = tiny_checkpoint(family), [Request("a", [5, 9, 2, 7] * 9, max_tokens=6, logprobs=True)]
    answers = []
    for warm in (False, True):
        engine = OpenedEngine(folder, policy="all", block_size=16, pool_size_bytes=1 << 20)
        if warm:
            begun, model, arena = [], engine.parts.model, engine.parts.arena
            monkeypatch.setattr(model, "on_layer", lambda begun=begun: begun.append(None))
            warm_up(model, arena, max_batch_tokens, 2 if arena.layout.has_tokens else None, most_rows=200)
            assert begun
            monkeypatch.undo()
        answers += [(result.token_ids, result.logprobs) for result in engine.run(requests)]
        engine.close()
    assert answers[0] == answers[1] and answers[0][0]


@table(
    "max_batch_tokens, num_pages, count, pages",
    [(5000, None, 1024, 0), (100, None, 100, 0), (5000, 3, 192, 3), (65, 3, 65, 2), (64, 3, 64, 1), (9, 0, None, 0)],
)
@table("fails", [False, True])
def test_the_first_pass_of_a_device_fits_its_memory(
    max_batch_tokens: int, num_pages: int | None, count: int | None, pages: int, fails: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches a warm-up beyond the pages or the pass that there is room for, one that is not waited for, and a failed
    one that ends the opening."""
    made: list[Any] = []
    read: list[int] = []

    def begin(model: object, arena: object, decodes: object, chunks: list[Any]) -> Any:
        made.extend(chunks)
        return SimpleNamespace(failed=fails, read=lambda: read.append(1))

    monkeypatch.setattr(first_passes, "Pass", begin)
    nothing: Any = None
    warm_up(nothing, nothing, max_batch_tokens, num_pages, most_rows=0)
    if count is None:
        assert not made
        return
    [chunk] = made
    sequence = chunk.sequence
    assert (chunk.begin, chunk.count, chunk.samples, sequence.slot) == (0, count, True, 0)
    assert np.array_equal(sequence.pages, np.arange(pages)) and len(sequence.tokens) == count
    assert read == [1] * (not fails)


def test_drafts_are_warmed_up_at_each_size_that_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the first pass with drafts waits for a kernel to be chosen, or one is tried that no pass will have."""
    made: list[tuple[int, int, int]] = []

    def begin(model: object, arena: object, decodes: object, chunks: list[Any]) -> Any:
        [chunk] = chunks
        made.append((chunk.count, len(chunk.draft), len(chunk.sequence.pages)))
        return SimpleNamespace(failed=True)

    monkeypatch.setattr(first_passes, "Pass", begin)
    nothing: Any = None
    for most_rows, num_pages, drafts in (
        (8, None, []),
        (9, None, [(1, 15, 0)]),
        (64, None, [(1, 15, 0), (1, 63, 0)]),
        (65, None, [(1, 15, 0), (1, 63, 0), (1, 127, 0)]),
        (999, None, [(1, 15, 0), (1, 63, 0), (1, 127, 0), (1, 255, 0)]),
        (999, 2, [(1, 15, 1), (1, 63, 1), (1, 127, 2)]),
    ):
        made.clear()
        warm_up(nothing, nothing, 5, num_pages, most_rows)
        assert made == [(5, 0, 1 if num_pages else 0), *drafts], most_rows


@pytest.mark.parametrize("family", ["mamba", "jamba", "qwen3_5"])
def test_measuring_changes_no_answer(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches states, keys or files that measuring leaves, and measuring again what the store knows."""
    folder, requests = tiny_checkpoint(family), [Request("a", [5, 9, 2, 7] * 9, max_tokens=6, logprobs=True)]
    options: dict[str, Any] = {"policy": "planned", "block_size": 16, "pool_size_bytes": 1 << 20}
    cold = Engine(folder, **options)
    expected = [(result.token_ids, result.logprobs) for result in cold.run(requests)]
    for number in range(2):
        engine = Engine(folder, **options, store=tmp_path / "store", measures_reading=True)
        assert engine.reading_tokens is not None and engine.reading_tokens >= 1
        assert not list((tmp_path / "store" / "tmp").glob("*.tmp"))
        assert [(result.token_ids, result.logprobs) for result in engine.run(requests)] == expected
        engine.close()
        if not number:
            measured = engine.reading_tokens
            monkeypatch.setattr(first_passes, "Pass", lambda *_: pytest.fail("it is measured again"))
    assert engine.reading_tokens == measured
    assert cold.reading_tokens is None


@table("family, most, num_pages, lengths", [
    ("mamba", 5000, None, [64, 64, 1638, 1638, 1638]), ("mamba", 9, None, [9] * 5),
    ("jamba", 5000, 3, [64, 64, 192, 192, 192]),
])  # fmt: skip
def test_reading_is_counted_in_tokens_of_a_long_prompt(
    family: str, most: int, num_pages: int | None, lengths: list[int], tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches the rate of a short prompt, which is lower, a first pass that counts, and a prompt beyond the pages."""
    parts = open_parts(tiny_checkpoint(family), EngineOptions(pool_size_bytes=1 << 20), print)
    clock, seen = [0.0], []

    def begin(model: object, arena: object, decodes: object, chunks: list[Any]) -> Any:
        clock[0] += (5.0 if not seen else 0.0) + chunks[0].count / 8192
        seen.append(chunks[0].count)
        return SimpleNamespace(failed=False, read=list)

    monkeypatch.setattr(first_passes, "Pass", begin)
    monkeypatch.setattr(first_passes.time, "perf_counter", lambda: clock[0])
    store: Any = SimpleNamespace(time_reading=lambda fingerprint, position, arrays: 0.00305)
    assert measure_reading(parts.model, parts.arena, store, most, num_pages, 20) == 25
    assert seen == lengths
    store.time_reading = lambda *_: None
    assert measure_reading(parts.model, parts.arena, store, most, num_pages, 20) is None


def test_a_failed_pass_leaves_it_unmeasured(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a pass that fails while it is measured ends the run, or its cost is kept."""
    monkeypatch.setattr(first_passes, "Pass", lambda *_: SimpleNamespace(failed=True))
    engine = Engine(tiny_checkpoint("mamba"), policy="planned", store=tmp_path / "s", measures_reading=True)
    engine.close()
    assert engine.reading_tokens is None and not (tmp_path / "s" / "reading-costs.json").exists()
