"""Between the pool and the store: pins while something is written, and which calls the store gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from apcbatch import Engine, Request
from apcbatch.config import Config
from apcbatch.engine import persistence as persistence_module
from apcbatch.engine.counters import Counters
from apcbatch.engine.memory import DEVICE_QUEUE_BYTES, HOST_QUEUE_BYTES
from apcbatch.engine.parts import EngineOptions
from apcbatch.engine.persistence import WRITE_THREADS, Persistence
from apcbatch.engine.pool import NO_PAGES, Snapshot
from apcbatch.layout import CONV, SSM, StateLayout
from apcbatch.model.arena import StateArena
from tests.effort import table
from tests.engine.runs import tokens


class SlowStore:
    """A store whose writes end when it is flushed, and that takes a limited number at a time."""

    def __init__(self, takes: int = 10, stores: bool = True) -> None:
        self.takes, self.stores = takes, stores
        self.queued: list[tuple[bytes, Callable[[bytes, bool], None]]] = []
        self.touched: list[bytes] = []

    def register(self, fingerprint: bytes, name: str, layout: Any) -> None:
        self.registered = (fingerprint, name, sorted(layout))

    def put(
        self, key: bytes, position: int, parent: Any, fingerprint: bytes, arrays: Any, done: Any, again: bool
    ) -> bool:
        if len(self.queued) == self.takes and not again:
            return False
        self.queued.append((key, done))
        return True

    def flush(self) -> None:
        while self.queued:
            key, done = self.queued.pop(0)
            done(key, self.stores)

    def touch(self, key: bytes) -> None:
        self.touched.append(key)


def persistence(store: SlowStore) -> Persistence:
    """Of an arena of one slot: its ssm is 1 everywhere, its conv 2."""
    arena = StateArena(
        StateLayout.of([SSM.part(0, (2, 3), "float32"), CONV.part(0, (1, 3), "float32")]), 1, 0, torch.device("cpu")
    )
    for number, name in enumerate(("ssm", "conv"), start=1):
        arena.slots[name].fill_(number)
    return Persistence(store, arena, b"f", "m")  # type: ignore[arg-type]


def test_what_is_written_is_pinned_until_it_is() -> None:
    """Catches a snapshot dropped while it is written, one pinned for good, and a wait that does not say whether it
    waited."""
    store = SlowStore()
    kept, snapshot = persistence(store), Snapshot(b"a", 7, 0, NO_PAGES)
    assert kept.wait() is False
    assert kept.save(snapshot, None) is True and (snapshot.pins, snapshot.stored) == (1, True)
    assert kept.save(snapshot, None) is True and (snapshot.pins, len(store.queued)) == (1, 1), "is under way"
    kept.drain()
    assert snapshot.pins == 1
    assert kept.wait() is True and (snapshot.pins, snapshot.stored) == (0, True)
    assert kept.wait() is False
    kept.touch(snapshot)
    assert store.touched == [b"a"] and store.registered == (b"f", "m", ["conv", "ssm"])


def test_what_is_not_taken_or_fails_is_not_stored() -> None:
    """Catches a snapshot that is taken for stored although the queue was full or the disk refused it."""
    full, failing = SlowStore(takes=0), SlowStore(stores=False)
    for store, taken in ((full, False), (failing, True)):
        kept, snapshot = persistence(store), Snapshot(b"a", 7, 0, NO_PAGES)
        assert kept.save(snapshot, None) is taken
        kept.wait()
        assert (snapshot.pins, snapshot.stored) == (0, False)
        kept.touch(snapshot)
        assert not store.touched
        assert kept.save(snapshot, None) is taken and snapshot.refused is not taken, "it may be tried again"
        assert kept.save(snapshot, None, again=True) and not snapshot.refused


class FetchingStore(SlowStore):
    """A slow store that fetches arrays when it writes them, as one of a device does."""

    def __init__(self) -> None:
        super().__init__()
        self.fetches: list[Any] = []
        self.files: dict[str, np.ndarray] = {}
        self.wanted = True

    def put(
        self, key: bytes, position: int, parent: Any, fingerprint: bytes, arrays: Any, done: Any, again: bool
    ) -> bool:
        self.fetches.append(arrays)
        return super().put(key, position, parent, fingerprint, arrays, done, again)

    def fetch(self) -> None:
        for fetch in self.fetches:
            with fetch() as arrays:
                self.files = {name: array.copy() for name, array in arrays.items()}
        self.fetches.clear()

    def flush(self) -> None:
        if self.wanted:
            self.fetch()
        super().flush()


def test_a_slot_on_a_device_is_pinned_until_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a slot that holds room until its file is written, one that goes before it is copied, and a snapshot of
    the same key, computed again meanwhile, that is taken for unwritten for good."""
    monkeypatch.setattr(StateArena, "on_host", False)
    store = FetchingStore()
    kept, snapshot = persistence(store), Snapshot(b"a", 7, 0, NO_PAGES)
    assert kept.save(snapshot, None) and kept.save(snapshot, None)
    kept.drain()
    assert (snapshot.pins, snapshot.stored) == (1, True)
    store.fetch()
    kept.drain()
    assert (snapshot.pins, snapshot.stored, len(store.queued)) == (0, True, 1)
    assert {name: float(array.max()) for name, array in store.files.items()} == {"ssm": 1.0, "conv": 2.0}
    again = Snapshot(b"a", 7, 0, NO_PAGES)
    assert kept.save(again, None) and (again.pins, again.stored, len(store.queued)) == (0, True, 1)
    store.stores = False
    assert kept.wait() and (again.pins, again.stored) == (0, False)


def test_a_write_that_is_never_fetched_unpins_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a slot that is lost where the store has the snapshot already, or gives it up."""
    monkeypatch.setattr(StateArena, "on_host", False)
    store = FetchingStore()
    store.wanted = False
    kept, snapshot = persistence(store), Snapshot(b"a", 7, 0, NO_PAGES)
    assert kept.save(snapshot, None)
    assert kept.wait() and (snapshot.pins, snapshot.stored) == (0, True)


def test_a_device_that_fails_costs_the_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a slot or a buffer that is lost with a failed copy, and an error that the store does not know."""
    monkeypatch.setattr(StateArena, "on_host", False)

    def fails(*of: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    store = FetchingStore()
    kept, snapshot = persistence(store), Snapshot(b"a", 7, 0, NO_PAGES)
    for _ in range(2 * WRITE_THREADS):
        with monkeypatch.context() as patched:
            patched.setattr(StateArena, "copy_out", fails)
            assert kept.save(snapshot, None)
            with pytest.raises(OSError, match="unspecified launch failure"):
                store.fetch()
            store.fetches.clear()
        store.stores = False
        assert kept.wait() and (snapshot.pins, snapshot.stored) == (0, False)
    assert kept.save(snapshot, None)
    store.fetch()


@table(
    "staging_bytes, cores, made",
    [(1 << 28, None, (64, 1)), (1 << 28, 1, (64, 1)), (1 << 28, 6, (64, 3)), (1 << 28, 64, (64, 8)),
     (36 * 5, 64, (5, 5)), (35, 64, (2, 2))],
)  # fmt: skip
def test_what_is_read_ahead_fits_the_staging_memory(
    staging_bytes: int, cores: int | None, made: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: more pinned buffers than their memory holds, fewer than two, or threads that wait for a buffer for good.
    made: buffers and threads, for slots of 36 bytes."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(StateArena, "on_host", False)
    monkeypatch.setattr(persistence_module, "STAGING_BYTES", staging_bytes)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    note = lambda read, staging, threads: found.append((staging.num_buffers, threads))  # noqa: E731
    monkeypatch.setattr(persistence_module, "StorePrefetcher", note)
    persistence(SlowStore())
    assert found == [made]


@pytest.mark.parametrize("policy", ["all", "planned"])
def test_staged_snapshots_are_those_of_the_host(
    policy: str, tiny_checkpoint: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a slot that is overwritten before it is copied, one that a pass reads before it is filled, and counts
    that depend on what was read ahead in time: many requests, a pool with room for few of their snapshots."""
    prompts = [[1 + (k * (3 + group)) % 50 for k in range(150)] + [1 + n] * 20 for group in range(5) for n in range(4)]
    options = {"block_size": 16, "policy": policy, "max_running": 4, "max_batch_tokens": 128}

    def run(folder: Path, on_host: bool) -> list[tuple[Any, ...]]:
        monkeypatch.setattr(StateArena, "on_host", on_host)
        engine = Engine(tiny_checkpoint("mamba"), store=folder, pool_size_bytes=1 << 18, **options)
        requests = [Request(str(i), p, max_tokens=4, ignore_eos=True, logprobs=True) for i, p in enumerate(prompts)]
        found = [(one.id, one.token_ids, one.logprobs, one.cached_tokens) for one in engine.run(requests)]
        engine.close()
        return sorted(found)

    cold = run(tmp_path / "host", True)
    assert [one[:3] for one in run(tmp_path / "staged", False)] == [one[:3] for one in cold]
    warm = run(tmp_path / "host", True)
    assert run(tmp_path / "host", False) == warm and [one[:3] for one in warm] == [one[:3] for one in cold]
    assert min(one[3] for one in warm) >= 144


def test_without_a_store_only_what_happened_is_counted(tiny_checkpoint: Callable[..., Any]) -> None:
    """Catches counts of things that did not happen."""
    engine = Engine(tiny_checkpoint("mamba"), policy="none", pool_size_bytes=1 << 20, draft=())
    assert not any(value for name, value in asdict(engine.counters).items() if name != "seconds")
    assert not any(engine.counters.seconds.values())
    engine.counters.seconds["store"] = 5.0
    engine.step()
    assert 5.0 <= engine.counters.seconds["store"] < 60.0, "a step adds to what was counted before"
    list(engine.run([Request("r", [1, 2, 3], max_tokens=2, ignore_eos=True)]))
    seconds = engine.counters.seconds
    counts = {"unique_tokens": 4, "prefill_tokens": 3, "decode_tokens": 1, "decode_chunks": 1}
    counted = Counters(**counts, seconds=seconds)
    assert asdict(engine.counters) == asdict(counted)
    assert min(seconds["prefill"], seconds["decode"]) > 0
    engine.close()


def test_the_python_surface_has_the_defaults_of_the_command(tiny_checkpoint: Callable[..., Any]) -> None:
    """Catches a default that differs between `Engine` and `apcbatch run`, and a dtype that is not the checkpoint's."""
    for model, dtype in ((tiny_checkpoint("mamba"), "float32"), ("demo", "bfloat16")):
        engine = Engine(model, pool_size_bytes=1 << 20)
        assert (engine.dtype, engine.block_size) == (dtype, Config().block_size)
        engine.close()
    options, config = EngineOptions(), Config()
    for name in ("dtype", "exact", "block_size", "max_batch_tokens", "max_running", "store"):
        assert getattr(options, name) == getattr(config, name), name
    assert options.store_size_bytes == config.store_size


@pytest.mark.parametrize("policy", ["last", "planned"])
def test_the_end_of_an_answer_outlives_the_engine(
    policy: str, tiny_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    """Catches an answer whose last boundary, kept back until it has ended, never reaches the store; and one whose
    boundaries all do."""
    options = {"block_size": 16, "policy": policy, "store": tmp_path, "pool_size_bytes": 16 << 20}
    engine = Engine(tiny_checkpoint("jamba"), **options)
    prompt = [1 + k % 50 for k in range(20)]
    [result] = engine.run([Request("r", prompt, max_tokens=40, ignore_eos=True)])
    engine.close()
    engine = Engine(tiny_checkpoint("jamba"), **options)
    assert engine.boundaries(prompt + result.token_ids) == [16, 48]
    [again] = engine.run([Request("r", prompt + result.token_ids, max_tokens=1)])
    assert (again.cached_from, again.cached_tokens) == ("disk", 48)
    engine.close()


MiB, GiB = 1 << 20, 1 << 30


@table("pool_bytes, slot_bytes, on_host, on_device", [
    (40, 9, HOST_QUEUE_BYTES, 10), (1 << 50, 3, HOST_QUEUE_BYTES, DEVICE_QUEUE_BYTES),
    (4 * GiB, 49 * MiB, 32 * 49 * MiB, GiB), (4 * GiB, 260 * MiB, 2 * GiB, GiB),
    (1 << 50, 260 * MiB, 32 * 260 * MiB, 32 * 260 * MiB),
])  # fmt: skip
def test_the_queue_is_sized_by_the_state_and_the_pool(
    pool_bytes: int, slot_bytes: int, on_host: int, on_device: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fault: a queue for a few large states, so that most of those offered at once are lost; or snapshots that wait to
    be written fill the pool, so that nothing in it may be evicted."""
    given: list[dict[str, Any]] = []
    opened = SimpleNamespace(held=(0, 0), is_read_only=False)
    monkeypatch.setattr(persistence_module.Store, "open", lambda folder, **options: given.append(options) or opened)
    for host in (False, True):
        persistence_module.open_store(tmp_path, 1000, pool_bytes, slot_bytes, host, print)
    assert [(one["queue_bytes"], one["write_threads"]) for one in given] == [(on_device, WRITE_THREADS), (on_host, 1)]
    assert {one["size_limit_bytes"] for one in given} == {1000}


@pytest.mark.parametrize("pool_bytes", [16 << 20, 1 << 16])
def test_a_run_ends_with_the_snapshots_that_its_queue_had_no_room_for(
    pool_bytes: int, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: snapshots offered at once are lost although they are in memory when the run ends; and those that are not
    are missing in the count."""
    monkeypatch.setattr(persistence_module, "queue_bytes", lambda *of: 1)
    engine = Engine(
        tiny_checkpoint("jamba"), block_size=16, pool_size_bytes=pool_bytes, store=tmp_path, max_batch_tokens=4096
    )
    results = list(engine.run([Request(str(i), tokens(149, i), max_tokens=1) for i in range(5)]))
    assert all(result.error is None for result in results)
    refused = engine.counters.store_skipped
    engine.flush()
    counters, num_files = engine.counters, len(list(tmp_path.glob("objects/*/*/*")))
    assert num_files + counters.store_skipped == counters.snapshots_written
    if pool_bytes > 1 << 20:
        assert refused > 0 and (num_files, counters.store_skipped) == (5 * (149 // 16), 0)
    engine.close()


def test_closing_ends_what_reads_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: threads that continue reading from a store that is closed."""
    closed: list[bool] = []
    prefetcher = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(persistence_module, "StorePrefetcher", lambda *_: prefetcher)
    monkeypatch.setattr(StateArena, "on_host", False)
    kept = persistence(SlowStore())
    kept.close()
    kept.close()
    assert closed == [True]


@table("held, is_read_only, said", [
    ((1, 2001), False, "holds 2,001 bytes in 1 snapshot, and --store-size is 1,000 bytes: at least 1,001 bytes of"),
    ((1200, 5000), False, "holds 5,000 bytes in 1,200 snapshots, and --store-size is 1,000 bytes: at least 4,000"),
    ((1, 2000), False, ""), ((9, 5000), True, ""),
])  # fmt: skip
def test_a_size_that_would_drop_most_of_a_store_is_told(
    held: tuple[int, int], is_read_only: bool, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fault: a forgotten --store-size empties a store in silence; or a warning where less than half would go."""
    told: list[str] = []
    opened: Any = SimpleNamespace(held=held, is_read_only=is_read_only)
    monkeypatch.setattr("apcbatch.store.Store.open", lambda folder, **options: opened)
    assert persistence_module.open_store(tmp_path, 1000, 0, 1, True, told.append) is opened
    assert [said in one for one in told] == [True] * bool(said)
