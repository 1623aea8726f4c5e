"""What an engine's options become: slots, pages and groups, and the first pass of a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from apcbatch import Engine
from apcbatch.config import Config
from apcbatch.engine import open
from apcbatch.errors import UsageError
from apcbatch.model.families import load_model_config, state_layout


@pytest.mark.parametrize(("family", "policy"), [("mamba", "all"), ("jamba", "planned"), ("jamba", "none")])
def test_memory_is_parted_into_slots_and_pages(
    family: str, policy: Any, tiny_checkpoint: Callable[..., Path], open_engine: Callable[..., Engine]
) -> None:
    """Catches a pool that holds less than it was given, slots of snapshots that sequences write to, and pages for one
    of both where live sequences and snapshots need them."""
    pool_bytes = 3 << 20
    engine = open_engine(tiny_checkpoint(family), policy=policy, max_running=5, pool_size_bytes=pool_bytes)
    layout, pool, pages = engine._arena.layout, engine._pool, engine._snapshots._pages
    slots = sorted(pool._free_slots)
    assert slots == list(range(5, 5 + (pool_bytes // layout.slot_bytes if policy != "none" else 0)))
    assert sorted(engine._scheduler._free_slots) == list(range(5))
    assert pages.num_pages == (2 * pool_bytes // layout.page_bytes + 1 if family == "jamba" else 0)
    assert pool.capacity_bytes == pool_bytes


def test_an_instruction_set_that_is_not_here_is_refused_where_it_was_asked_for() -> None:
    """Catches a traceback, or a sentence that does not say which option to change."""
    with pytest.raises(UsageError, match="^--isa: .*z80"):
        open.use_processor(Config(threads=1, isa="z80", origins={"isa": "--isa"}))
    with pytest.raises(UsageError, match="^isa: "):
        open.use_processor(Config(threads=1, isa="z80"))


@pytest.mark.parametrize(
    ("max_batch_tokens", "num_pages", "count", "pages"),
    [(5000, None, 1024, 0), (100, None, 100, 0), (5000, 3, 192, 3), (65, 3, 65, 2), (64, 3, 64, 1), (9, 0, None, 0)],
)
@pytest.mark.parametrize("fails", [False, True])
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

    monkeypatch.setattr(open, "Pass", begin)
    nothing: Any = None
    open.warm_up(nothing, nothing, max_batch_tokens, num_pages, most_rows=0)
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

    monkeypatch.setattr(open, "Pass", begin)
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
        open.warm_up(nothing, nothing, 5, num_pages, most_rows)
        assert made == [(5, 0, 1 if num_pages else 0), *drafts], most_rows


def test_a_gpu_without_kernels_is_told(
    tiny_checkpoint: Callable[..., Path], open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a run takes hours beside an idle GPU and nobody knows why; or a warning where the CPU was asked for."""
    sentence = "a CUDA device is here and this build has no kernels for it, so the CPU is used; see apcbatch doctor"
    monkeypatch.setattr(open, "choose_devices", lambda name, gpus: [torch.device("cpu")])
    for is_there, device, said in ((True, "auto", [sentence]), (True, "cpu", []), (False, "auto", [])):
        told: list[str] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        open_engine(tiny_checkpoint("mamba"), device=device, pool_size_bytes=1 << 16, warn=told.append)
        assert told == said, (is_there, device)


@pytest.mark.parametrize(
    ("draft", "max_running", "quarter", "most", "num_slots"),
    [
        (("lookup",), 5, 80, 64, 64),
        (("lookup",), 50, 80, 100, 80),
        (("lookup",), 50, 10, 100, 64),
        (("lookup",), 33, 99, 66, 66),
        ((), 50, 80, 0, 0),
    ],
)
def test_drafted_states_have_slots_of_their_own(
    draft: Any, max_running: int, quarter: int, most: int, num_slots: int, tiny_checkpoint: Callable[..., Path],
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Fault: the states of drafted tokens take more than a fourth of a device's pool, or the place of others."""
    monkeypatch.setattr(open, "writes_draft_states", lambda device: True)
    folder = tiny_checkpoint("mamba")
    slot_bytes = state_layout(load_model_config(folder), "float32").slot_bytes
    options = {"draft": draft, "max_running": max_running, "pool_size_bytes": 4 * quarter * slot_bytes}
    engine = open_engine(folder, dtype="float32", **options)
    first = max_running + 4 * quarter
    assert engine._drafting._slots == list(range(first, first + num_slots))
    assert engine._drafting._most_in_pass == most
    assert {len(part) for part in engine._arena.slots.values()} == {first + num_slots}  # type: ignore[union-attr]
