"""Which snapshots go when the store is full, and that the limit holds while they do."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.store import Store, eviction
from apcbatch.store.environment import Buffer, Files
from tests.effort import table, tries
from tests.store.conftest import (
    FINGERPRINT,
    arrays_of,
    assert_is,
    execute,
    key_of,
    num_bytes_in,
    object_files,
    put,
    put_chain,
)


class WatchedFiles(Files):
    """Real files; `peak_bytes` is the most that the folder's snapshot files, finished or not, ever had
    together.

    One call at a time, so that what is counted was there at one instant.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peak_bytes = 0
        self.lock_of_all = threading.Lock()

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        with self.lock_of_all:
            super().write(path, chunks)
            self.look()

    def rename(self, source: str, target: str) -> None:
        with self.lock_of_all:
            super().rename(source, target)
            self.look()

    def unlink(self, path: str) -> bool:
        with self.lock_of_all:
            return super().unlink(path)

    def look(self) -> None:
        files = [*object_files(self.folder), *(self.folder / "tmp").glob("*.tmp")]
        self.peak_bytes = max(self.peak_bytes, sum(path.stat().st_size for path in files))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [4_000, 15_000, 40_000] * tries(10))
def test_the_limit_holds_and_ancestors_outlive_descendants(folder: Path, warnings: list[str], limit: int) -> None:
    """At every write and rename, temporary files included; and after any evictions, no snapshot needs a
    parent that has gone: it would take room and never be usable."""
    files = WatchedFiles(folder)
    chains: list[list[bytes]] = []
    with Store.open(folder, limit, warn=warnings.append, files=files) as store:
        for step in range(120):
            chain = random.choice(chains) if chains and random.random() < 0.8 else []
            at = random.randrange(len(chain) + 1)
            key = key_of(step, 0)
            parent = (chain[at - 1], 16 * at) if at else None
            scale = random.choice([1, 1, 1, 10, 60])
            store.put(key, 16 * (at + 1), parent, FINGERPRINT, arrays_of(key, scale=scale))
            chains.append([*chain[:at], key])
            if random.random() < 0.3:
                store.touch(random.choice(chains)[-1])
            if random.random() < 0.2:
                store.flush()
                gone = "SELECT id FROM snapshots WHERE parent NOT IN (SELECT id FROM snapshots)"
                assert not execute(folder, gone)
        store.flush()
        assert files.peak_bytes <= limit
        assert store.stats().num_stranded == 0
        assert store.counters.evicted > 0
        report = store.check()
        assert report.faults == [] and report.num_bytes == store.stats().num_bytes <= limit


def test_two_handles_keep_one_limit(folder: Path, warnings: list[str]) -> None:
    """Two processes that each count only their own bytes would together store twice the limit."""
    files = WatchedFiles(folder)
    with (
        Store.open(folder, 30_000, warn=warnings.append, files=files) as one,
        Store.open(folder, 30_000, warn=warnings.append, files=files) as two,
    ):
        for i in range(40):
            for name, store in (("one", one), ("two", two)):
                put(store, name, i, scale=20)
            if i % 10 == 0:
                one.flush()
        one.flush()
        two.flush()
        assert files.peak_bytes <= 30_000
        assert one.stats().num_bytes == two.stats().num_bytes > 20_000


def test_a_limit_smaller_than_one_snapshot_stores_nothing_and_says_so_once(folder: Path, warnings: list[str]) -> None:
    done: list[bool] = []
    with Store.open(folder, 500, warn=warnings.append) as store:
        for i in range(5):
            put(store, "a", i, done)
            store.flush()
        assert store.counters.skipped_no_room == 5
    assert done == [False] * 5
    assert object_files(folder) == [] and list((folder / "tmp").iterdir()) == []
    assert len(warnings) == 1 and "--store-size" in warnings[0]


Offer = tuple[str, int, int, int]  # the name, the position, the scale, how often it is used


def offers(name: str, count: int, position: int = 16, scale: int = 1, uses: int = 0) -> list[Offer]:
    return [(f"{name} {i}", position, scale, uses) for i in range(count)]


@table("before, limit, after, stay, go", [
    # One huge snapshot must not clear the store and then not be stored either.
    (offers("old", 5), 10_000, offers("huge", 1, scale=1000), offers("old", 5), offers("huge", 1)),
    # Refreshed is only what was consumed: here one of ten equal snapshots.
    (offers("old", 1, uses=1) + offers("other", 9), None, offers("new", 9), offers("old", 1), offers("other", 9)),
    # A system prompt that hundreds of requests start from must not go for one that was needed once, just now.
    (offers("often", 1, uses=3) + offers("once", 1, uses=1), None, offers("new", 1),
     offers("often", 1) + offers("new", 1), offers("once", 1)),
    # What is being written cannot be evicted; in one large batch, everything that is there would have to go for it.
    (offers("old", 1, uses=50), 14_000, offers("new", 60), offers("old", 1), []),
    # Uses of long ago must not hold room for ever.
    (offers("old", 1, uses=3), 14_000, offers("new", 200), [], offers("old", 1)),
    # The one goes that saves the fewest tokens a byte, not the oldest.
    (offers("long", 1, 4096) + offers("large", 1, 64, 90) + offers("short", 1, 64), 14_000, offers("more", 1, 64, 30),
     offers("long", 1) + offers("short", 1) + offers("more", 1), offers("large", 1)),
])  # fmt: skip
def test_what_is_worth_most_stays(
    before: list[Offer], limit: int | None, after: list[Offer], stay: list[Offer], go: list[Offer], tmp_path: Path,
    warnings: list[str],
) -> None:  # fmt: skip
    """Fault: another snapshot goes than the one that saves the fewest tokens for its bytes and its uses."""

    def offer(offered: list[Offer]) -> None:
        for number, (name, position, scale, uses) in enumerate(offered):
            key = put(store, name, position=position, scale=scale)
            for _ in range(uses):
                store.touch(key)
            if number % 20 == 0:
                store.flush()
        store.flush()

    with Store.open(tmp_path, warn=warnings.append) as store:
        offer(before)
        full = store.stats().num_bytes
    with Store.open(tmp_path, full if limit is None else limit, warn=warnings.append) as store:
        offer(after)
        left = store.present([key_of(name, 16) for name, *_ in before + after])
    assert left >= {key_of(name, 16) for name, *_ in stay} and not left & {key_of(name, 16) for name, *_ in go}


def test_a_conversation_larger_than_the_limit_keeps_its_beginning(folder: Path, warnings: list[str]) -> None:
    """Its later snapshots need its earlier ones; evicting those would leave nothing usable."""
    with Store.open(folder, 12_000, warn=warnings.append) as store:
        keys = put_chain(store, "a", 100)
        store.flush()
        present = store.present(keys)
        assert 5 <= len(present) < 20 and present == set(keys[: len(present)])
        assert len(store.get_chain(keys[len(present) - 1], FINGERPRINT).links) == len(present)


def test_a_parent_stays_for_the_child_that_is_on_its_way(folder: Path, warnings: list[str]) -> None:
    """Without that a growing conversation in a full store would evict its own last snapshot to make room for
    the next, which then has no parent."""
    parent, child = key_of("a", 16), key_of("a", 32)
    with Store.open(folder, warn=warnings.append) as store:
        store.put(parent, 16, None, FINGERPRINT, arrays_of(parent))
        others = [key_of("other", i) for i in range(5)]
        for key in others:
            store.put(key, 64, None, FINGERPRINT, arrays_of(key))
        store.flush()
        full = store.stats().num_bytes
    with Store.open(folder, full + 200, warn=warnings.append) as store:
        store.put(child, 32, (parent, 16), FINGERPRINT, arrays_of(child))
        store.flush()
        assert store.present([parent, child]) == {parent, child}
        assert len(store.present(others)) == 4


def test_opening_with_a_smaller_limit_evicts_nothing_until_something_is_stored(
    folder: Path, warnings: list[str]
) -> None:
    """`store stat` of a large store with the default limit must not delete half of it."""
    with Store.open(folder, warn=warnings.append) as store:
        keys = put_chain(store, "a", 20)
    with Store.open(folder, 5_000, warn=warnings.append) as store:
        store.flush()
        assert store.present(keys) == set(keys)
        key = put(store, "b")
        store.flush()
        assert_is(store.get(key, FINGERPRINT), key)
        assert num_bytes_in(folder) <= 5_000


def test_no_more_is_dropped_than_there_was_at_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: `prune` continues for as long as another process adds snapshots."""
    dropped: list[int] = []
    monkeypatch.setattr(eviction, "drop", lambda entry, *_: dropped.append(entry))
    monkeypatch.setattr(eviction, "evict_one", lambda *_: dropped.append(0))
    monkeypatch.setattr(eviction, "ROWS_PER_TRANSACTION", 4)
    for count in (0, 1, 4, 9):
        entered: list[int] = []
        index: Any = SimpleNamespace(
            totals=lambda count=count: (count, 100),
            leaves=lambda model, since, limit: [1] * limit,
            transaction=lambda entered=entered: nullcontext(entered.append(1)),
            deepest=lambda: 1,
            model_ids=lambda model: [1],
        )
        eviction.prune(index, None, model="m")  # type: ignore[arg-type]
        assert len(entered) == -(-count // 4) and len(dropped) == 4 * len(entered)
        dropped.clear()
        eviction.prune(index, None, size_bytes=99)  # type: ignore[arg-type]
        assert len(entered) == 2 * -(-count // 4) and len(dropped) == 2 * count, "each one protected, and then dropped"
        dropped.clear()


def test_room_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: two snapshots of one batch that together exceed the limit, for which all others are evicted."""
    evicted: list[int] = []
    monkeypatch.setattr(eviction, "evict_one", lambda *_: evicted.append(1) or SimpleNamespace(num_bytes=30))
    index: Any = SimpleNamespace(reserved_bytes=lambda: 20, totals=lambda: (3, 50))
    capacity = eviction.Capacity(index, None, 100, set())  # type: ignore[arg-type]
    assert capacity.take(30) and not evicted, "20 are reserved, and 50 used"
    assert capacity.take(30) and (len(evicted), capacity.num_evicted) == (1, 1)
    assert not capacity.take(21) and len(evicted) == 1, "of 80, 60 are given"
    assert capacity.take(20)
