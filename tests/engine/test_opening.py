"""What an engine's options become: slots, pages and groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apcbatch import Engine, Request
from apcbatch.config import Config
from apcbatch.cores import Cores
from apcbatch.engine import parts
from apcbatch.engine.drafting import Drafting
from apcbatch.errors import UsageError
from apcbatch.kernels.processor import num_threads, set_threads
from apcbatch.model.families import load_model_config, state_layout
from tests.engine.test_given_back import free_slots


@pytest.mark.parametrize(("family", "policy"), [("mamba", "all"), ("jamba", "planned"), ("jamba", "none")])
def test_memory_is_parted_into_slots_and_pages(
    family: str, policy: Any, tiny_checkpoint: Callable[..., Path], open_engine: Callable[..., Engine]
) -> None:
    """Catches a pool that holds less than it was given, slots of snapshots that sequences write to, and pages for one
    of both where live sequences and snapshots need them."""
    pool_bytes = 3 << 20
    engine = open_engine(tiny_checkpoint(family), policy=policy, max_running=5, pool_size_bytes=pool_bytes)
    layout, pool = engine.parts.arena.layout, engine.parts.pool
    assert free_slots(pool) == list(range(5, 5 + (pool_bytes // layout.slot_bytes if policy != "none" else 0)))
    for number in range(6):
        engine.submit(Request(str(number), [1 + number] * 3, max_tokens=9))
    engine.step()
    assert sorted(sequence.slot for sequence in engine.parts.scheduler.places.running) == list(range(5))
    assert engine.parts.pages.num_pages == (2 * pool_bytes // layout.page_bytes + 1 if family == "jamba" else 0)
    assert pool.capacity_bytes == pool_bytes


def test_an_instruction_set_that_is_not_here_is_refused_where_it_was_asked_for() -> None:
    """Catches a traceback, or a sentence that does not say which option to change."""
    with pytest.raises(UsageError, match="^--isa: .*z80"):
        parts.use_processor(Config(threads=1, isa="z80", origins={"isa": "--isa"}))
    with pytest.raises(UsageError, match="^isa: "):
        parts.use_processor(Config(threads=1, isa="z80"))


@pytest.mark.parametrize(("draft", "max_running", "quarter", "most", "num_slots"), [
    (("lookup",), 5, 80, 64, 64), (("lookup",), 50, 80, 100, 80), (("lookup",), 50, 10, 100, 64),
    (("lookup",), 33, 99, 66, 66), ((), 50, 80, 0, 0),
])  # fmt: skip
def test_drafted_states_have_slots_of_their_own(
    draft: Any, max_running: int, quarter: int, most: int, num_slots: int, tiny_checkpoint: Callable[..., Path],
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Fault: the states of drafted tokens take more than a fourth of a device's pool, or the place of others."""
    monkeypatch.setattr(parts, "writes_draft_states", lambda device: True)
    folder = tiny_checkpoint("mamba")
    slot_bytes = state_layout(load_model_config(folder), "float32").slot_bytes
    options = {"draft": draft, "max_running": max_running, "pool_size_bytes": 4 * quarter * slot_bytes}
    given: list[tuple[list[int], int]] = []

    def noted(drafts: Any, model: Any, slots: range, most: int, **clock: Any) -> Drafting:
        given.append((list(slots), most))
        return Drafting(drafts, model, slots, most, **clock)

    monkeypatch.setattr(parts, "Drafting", noted)
    engine = open_engine(folder, dtype="float32", **options)
    first = max_running + 4 * quarter
    assert given == [(list(range(first, first + num_slots)), most)]
    assert {len(part) for part in engine.parts.arena.slots.values()} == {first + num_slots}  # type: ignore[union-attr]


def test_passes_of_a_cpu_are_compared_by_their_thread_s_time(
    tiny_checkpoint: Callable[..., Path], open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: other programs' load makes drafts look slow, and they are left out."""
    told: list[float] = []
    monkeypatch.setattr("time.thread_time", lambda: told.append(0.0) or 0.0)
    engine = open_engine(tiny_checkpoint("mamba"), device="cpu", pool_size_bytes=1 << 20)
    [result] = engine.run([Request("r", [1, 2, 3] * 4, max_tokens=4, ignore_eos=True)])
    assert result.error is None and told


def test_threads_are_those_of_the_option_or_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an option that is not read or that is cut to what is thought best, a container whose quota is not seen,
    a torch that was told to use fewer, and a number that torch would answer with a sentence of its own."""
    cores, before = Cores(logical=8, physical=4, quota=None, nodes=1, huge_pages=None), torch.get_num_threads()
    try:
        for given, quota, torch_uses, expected in (
            (3, None, 1, 3), (None, None, 16, 4), (None, None, 4, 4), (None, None, 2, 2), (None, 1.5, 4, 1),
        ):  # fmt: skip
            monkeypatch.setattr(parts, "find_cores", lambda quota=quota: replace(cores, quota=quota))
            torch.set_num_threads(torch_uses)
            parts.use_processor(Config() if given is None else Config(threads=given))
            assert num_threads() == torch.get_num_threads() == expected
        with pytest.raises(ValueError, match="need at least one thread; asked for are 0"):
            set_threads(0)
    finally:
        torch.set_num_threads(before)
