"""Which snapshot a sequence resumes from, and what becomes of those that it writes: with a pool, and a store that says
what it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from apcbatch.engine.page_tables import PageTables
from apcbatch.engine.persistence import Stranded
from apcbatch.engine.pool import NO_PAGES, PagePool, Snapshot, SnapshotPool
from apcbatch.engine.sequence import Chunk, Keep, Sequence, make_sequence
from apcbatch.engine.snapshots import Snapshots
from apcbatch.prefix import prefix_key
from apcbatch.types import Policy, Request, RequestPlan
from tests.effort import table

MODEL = b"model"
PROMPT = list(range(1, 51))  # boundaries at 16, 32 and 48
SLOT_BYTES = 100


class Disk:
    """A store of one model. found: what `load` gives for a position of PROMPT (the snapshot, `Stranded`, nothing).
    loads: position, `awaited` and the pins of what is in memory, for each load; saved: position and parent."""

    def __init__(self, found: Mapping[int, Any], prefetches: bool = True) -> None:
        self.found = {key_at(position): outcome for position, outcome in found.items()}
        self.prefetches = prefetches
        self.loads: list[tuple[int, bool, list[int]]] = []
        self.saved: list[tuple[int, tuple[bytes, int] | None]] = []
        self.looked_up: list[list[int]] = []
        self.touched: list[int] = []
        self.prefetched: list[list[bytes]] = []
        self.takes = True

    def positions(self, keys: dict[int, bytes]) -> list[int]:
        self.looked_up.append(list(keys))
        return [position for position, key in keys.items() if key in self.found]

    def load(self, key: bytes, pool: SnapshotPool, pages: PagePool, awaited: bool) -> Any:
        position = next(one for one in (16, 32, 48) if key_at(one) == key)
        self.loads.append((position, awaited, [held.pins for held in pool]))
        if self.found[key] != "snapshot":
            return self.found[key]
        slot = pool.reserve(key, awaited)
        assert slot is not None
        return pool.insert(key, position, slot, NO_PAGES, awaited=awaited)

    def save(self, snapshot: Snapshot, parent: tuple[bytes, int] | None, again: bool = False) -> bool:
        self.saved.append((snapshot.position, parent))
        snapshot.refused = not (self.takes or again)
        return not snapshot.refused

    def touch(self, snapshot: Snapshot) -> None:
        self.touched.append(snapshot.position)

    def prefetch(self, keys: list[bytes]) -> None:
        self.prefetched.append(keys)


def key_at(position: int, tokens: list[int] = PROMPT) -> bytes:
    return prefix_key(MODEL, tokens, position)


class OwnSnapshots(Snapshots):
    """Snapshots with the pool and the page tables that they are made with. num_pages: of KV; 0 for a model without
    attention."""

    def __init__(self, disk: Disk | None = None, policy: Policy = "all", slots: int = 8, num_pages: int = 0) -> None:
        self.pages, persistence = PagePool(num_pages), cast(Any, disk)
        self.pool = SnapshotPool(range(slots), self.pages, SLOT_BYTES, 0, slots * SLOT_BYTES, lambda: False)
        arena = cast(Any, SimpleNamespace(copy_page=lambda source, target: None))
        self.page_tables = PageTables(self.pages, self.pool, arena, num_pages > 0)
        super().__init__(
            policy=policy, block_size=16, fingerprint=MODEL, pool=self.pool, pages=self.pages,
            page_tables=self.page_tables, persistence=persistence,
        )  # fmt: skip


def sequence_of(snapshots: Snapshots, tokens: list[int] = PROMPT, **options: Any) -> Sequence:
    sequence = make_sequence(Request("r", tokens, **{"max_tokens": 40} | options), 1000, None)
    snapshots.prepare(sequence)
    return sequence


def hold(snapshots: OwnSnapshots, *positions: int, reads: int = 0) -> list[Snapshot]:
    """Put snapshots of PROMPT into the pool."""
    made = []
    for position in positions:
        slot = snapshots.pool.reserve(key_at(position), reads > 0)
        assert slot is not None
        made.append(snapshots.pool.insert(key_at(position), position, slot, NO_PAGES, reads, reads > 0))
    return made  # type: ignore[return-value]


def write(snapshots: Snapshots, sequence: Sequence, *positions: int) -> list[Keep]:
    """Publish the snapshots at these positions as those of one pass."""
    keeps = []
    for position in positions:
        reserved = snapshots.reserve(sequence, position)
        if reserved is not None:
            keeps.append(Keep(position, reserved[1], reserved[0]))
    snapshots.publish(Chunk(sequence, 0, max(positions), keeps))
    return keeps


@table("in_memory, found, loads, got, left, reason", [
    ([], {}, [], (0, "none"), [], "cold"), ([16], {}, [], (16, "memory"), [], None),
    ([], {16: "snapshot", 32: "snapshot", 48: "snapshot"}, [48], (48, "disk"), [48, 32, 16], None),
    ([48], {16: "snapshot", 48: "snapshot"}, [], (48, "memory"), [48, 16], None),
    ([16], {16: "snapshot", 32: "snapshot"}, [32], (32, "disk"), [32, 16], None),
    ([], {16: "snapshot", 32: None, 48: None}, [48, 32, 16], (16, "disk"), [16], None),
    ([16], {16: "snapshot", 48: None}, [48], (16, "memory"), [16], None),
    ([], {32: None}, [32], (0, "none"), [], "cold"),
    ([], {16: "snapshot", 32: "snapshot", 48: Stranded(32)}, [48, 16], (16, "disk"), [48, 32, 16], "stranded"),
    ([], {16: "snapshot", 32: "snapshot", 48: Stranded(33)}, [48, 32], (32, "disk"), [48, 32, 16], "stranded"),
    ([16], {32: "snapshot", 48: Stranded(16)}, [48], (16, "memory"), [48, 32], "stranded"),
    ([], {16: Stranded(16), 48: Stranded(32)}, [48, 16], (0, "none"), [48, 16], "stranded"),
])  # fmt: skip
def test_the_longest_that_can_be_had_is_resumed_from(
    in_memory: list[int], found: dict[int, Any], loads: list[int], got: tuple[int, str], left: list[int],
    reason: str | None,
) -> None:  # fmt: skip
    """Catches a shorter snapshot where a longer one can be had, one read from disk that is in memory, a stranded one
    that is tried again under another position, and a missing one that is counted as there ever after."""
    disk = Disk(found)
    snapshots = OwnSnapshots(disk)
    held = hold(snapshots, *in_memory)
    sequence = sequence_of(snapshots)
    snapshots.attach(sequence)
    assert (sequence.reuse.cached_tokens, sequence.reuse.cached_from) == got and sequence.computed == got[0]
    assert [position for position, _, _ in disk.loads] == loads
    assert all(pins == [1] * len(in_memory) for _, _, pins in disk.loads), "kept safe while another one is read"
    assert (sequence.stored.positions, sequence.reuse.miss_reason) == (left, reason)
    assert disk.touched == [got[0]] * (got[0] > 0) and snapshots.num_read == (got[0] > 0)
    assert [one.pins for one in held] == [got[1] == "memory"] * len(held)
    snapshots.detach(sequence)
    snapshots.detach(sequence)
    assert [one.pins for one in snapshots.pool] == [0] * len(snapshots.pool)
    assert sequence.start is None


def test_what_a_plan_does_not_resume_from_is_not_counted_on() -> None:
    """Catches awaited snapshots evicted for one that the plan does not need, and one taken that is held for others."""
    plan = RequestPlan(resume_at=16, keep=(48,), reads=(1,))
    disk = Disk({16: "snapshot", 48: None})
    snapshots = OwnSnapshots(disk, "planned")
    snapshots.attach(sequence_of(snapshots, plan=plan))
    assert [(position, awaited) for position, awaited, _ in disk.loads] == [(48, False), (16, True)]
    for policy, position in (("planned", 0), ("all", 48)):
        other = OwnSnapshots(None, policy)
        hold(other, 48, reads=1)
        assert other.available_position(sequence_of(other, plan=plan if policy == "planned" else None)) == position


def test_what_is_available_is_the_longest_in_memory_or_on_disk() -> None:
    """Catches a wait for what is there, a look into the store for each step, and a prompt taken as a whole."""
    disk = Disk({32: "snapshot", 48: "snapshot"})
    snapshots = OwnSnapshots(disk)
    short, long = sequence_of(snapshots, PROMPT[:48]), sequence_of(snapshots)
    assert [snapshots.available_position(one) for one in (short, short, long)] == [32, 32, 48]
    assert disk.looked_up == [[32, 16], [48, 32, 16]]
    hold(snapshots, 16)
    assert snapshots.available_position(short) == 32
    memory = OwnSnapshots()
    assert memory.available_position(sequence_of(memory)) == 0
    hold(memory, 16, 32)
    assert memory.available_position(sequence_of(memory)) == 32


def test_the_ideal_counts_what_was_covered_and_what_is_stored() -> None:
    """Catches an ideal below what was restored, one called exact where a branch was dropped, and a fork that is not
    kept for the third prompt."""
    disk = Disk({48: None})
    snapshots = OwnSnapshots(disk, "planned")
    first, other = sequence_of(snapshots), sequence_of(snapshots, [*PROMPT[:40], *range(100, 120)])
    snapshots.attach(first)
    assert (first.reuse.ideal_cached_tokens, first.reuse.miss_reason) == (0, "cold"), "not there after all"
    snapshots.attach(other)
    assert (other.reuse.ideal_cached_tokens, other.reuse.miss_reason) == (40, "diverged")
    assert (list(first.retention.kept(0, 50)), list(other.retention.kept(0, 60))) == ([48], [32, 48])
    snapshots.coverage.root.regrown = True
    snapshots.coverage.root.children[1].regrown = True
    inexact = sequence_of(snapshots, [*PROMPT[:20], 7])
    snapshots.attach(inexact)
    assert (inexact.reuse.ideal_cached_tokens, inexact.reuse.ideal_is_bound) == (20, True)
    disabled = OwnSnapshots(None, "none")
    last = sequence_of(disabled)
    disabled.attach(last)
    assert last.reuse.miss_reason == "disabled"


def test_a_snapshot_that_was_evicted_is_named_as_the_reason() -> None:
    """Catches a miss that is put down to the policy although memory was short."""
    snapshots = OwnSnapshots(None, "all", slots=1)
    first = sequence_of(snapshots)
    snapshots.attach(first)
    write(snapshots, first, 48)
    write(snapshots, first, 32)
    again = sequence_of(snapshots)
    snapshots.attach(again)
    assert (again.reuse.cached_tokens, again.reuse.ideal_cached_tokens, again.reuse.miss_reason) == (32, 49, "evicted")


def test_a_slot_is_reserved_as_awaited_only_for_readers() -> None:
    """Catches a second copy of what is held, readers that are not added up, and an idle snapshot that pushes out
    awaited ones."""
    plan = RequestPlan(keep=(16,), reads=(2,), keep_for_later=(32,))
    snapshots = OwnSnapshots(None, "planned")
    sequence = sequence_of(snapshots, plan=plan)
    awaited, idle = snapshots.reserve(sequence, 16), snapshots.reserve(sequence, 32)
    assert awaited is not None and idle is not None and (awaited[1], idle[1]) == (key_at(16), key_at(32))
    snapshots.cancel(Chunk(sequence, 0, 32, [Keep(16, awaited[1], awaited[0]), Keep(32, idle[1], idle[0])]))
    assert snapshots.pool.num_reserved == 0
    (held,) = hold(snapshots, 16, reads=1)
    assert snapshots.reserve(sequence, 16) is None and held.reads_left == 3
    snapshots.add_reads(key_at(16), 2)
    snapshots.add_reads(key_at(16), -1)
    assert held.reads_left == 4 and snapshots.holds(key_at(16)) and not snapshots.holds(key_at(32))
    tight = OwnSnapshots(None, "planned", slots=1)
    hold(tight, 32, reads=1)
    assert tight.reserve(sequence_of(tight, plan=RequestPlan(keep=(16,), reads=(1,))), 16), "one reader suffices"
    full = OwnSnapshots(None, "all", slots=0)
    assert full.reserve(sequence_of(full), 16) is None
    for token in range(20):
        sequence.append(token, 0.0)
    reserved = snapshots.reserve(sequence, 64)
    assert reserved is not None and reserved[1] == key_at(64, [*PROMPT, *range(20)]), "a boundary of the answer"


def test_what_a_pass_has_written_is_published_as_the_plan_says() -> None:
    """Catches a snapshot that is lost behind one that found no room, one that is stored though nobody wants it later,
    a chain in the store with the wrong parent, and one that is counted twice."""
    plan = RequestPlan(keep=(32,), reads=(1,), keep_for_later=(16, 32, 48))
    disk = Disk({})
    snapshots = OwnSnapshots(disk, "planned", slots=3)
    sequence = sequence_of(snapshots, plan=plan)
    keeps = []
    for position in (16, 32, 48):
        keeps.append(Keep(position, *reversed(snapshots.reserve(sequence, position))))  # type: ignore
        snapshots.pool.passes_begun()
    (twin,) = hold(snapshots, 32, reads=1)
    assert twin.slot == keeps[0].slot, "which is taken over, as it was for nobody"
    snapshots.publish(Chunk(sequence, 0, 48, keeps))
    pool = snapshots.pool
    assert [one.key for one in pool] == [key_at(32), key_at(48)] and twin.reads_left == 2
    assert [one.for_later for one in pool] == [True, True]
    assert (snapshots.num_written, snapshots.num_for_later) == (0, 1), "32 was there already"
    assert disk.saved == [(32, None), (48, (key_at(32), 32))]
    again = sequence_of(snapshots, plan=RequestPlan(keep=(16,), reads=(1,)))
    write(snapshots, again, 16)
    assert (snapshots.num_written, snapshots.num_for_later, len(disk.saved)) == (1, 1, 2)
    first = pool.peek(key_at(16))
    assert first is not None and first.reads_left == 1 and not first.for_later


def test_the_latest_boundary_of_an_answer_takes_the_place_of_the_last() -> None:
    """Catches an answer's snapshots that pile up, one that is dropped while another request reads it, and one that is
    stored before the answer has ended, or not at all."""
    disk = Disk({})
    snapshots = OwnSnapshots(disk, "last")
    sequence = sequence_of(snapshots)
    write(snapshots, sequence, 48)
    for token in range(40):
        sequence.append(token, 0.0)
    whole = sequence.tokens.tolist()
    write(snapshots, sequence, 64)
    assert [one.key for one in snapshots.pool] == [key_at(48), key_at(64, whole)]
    write(snapshots, sequence, 80)
    assert [one.key for one in snapshots.pool] == [key_at(48), key_at(80, whole)]
    assert disk.saved == [(48, None)]
    snapshots.complete(sequence)
    assert disk.saved == [(48, None), (80, (key_at(48), 48))]
    assert sequence.stored.parent == (key_at(80, whole), 80)
    second = sequence_of(snapshots)
    snapshots.complete(second)
    second.stored.rolling = snapshots.pool.peek(key_at(80, whole))
    second.stored.rolling.pins += 1  # type: ignore[union-attr]
    write(snapshots, second, 16)
    for token in range(1, 41):
        second.append(token, 0.0)
    write(snapshots, second, 64)
    assert snapshots.holds(key_at(80, whole)), "it is being read"
    assert snapshots.holds(key_at(64, second.tokens.tolist()))
    assert len(disk.saved) == 3 and disk.saved[-1][0] == 16


def test_the_parent_of_a_stored_snapshot_is_the_last_that_the_store_took() -> None:
    """Catches a child whose parent the store refused, a dropped snapshot that is stored with another one's bytes, and
    a request that resumed and begins a chain of its own."""
    disk = Disk({})
    snapshots = OwnSnapshots(disk)
    sequence = sequence_of(snapshots)
    write(snapshots, sequence, 16)
    disk.takes = False
    write(snapshots, sequence, 32)
    refused = snapshots.pool.peek(key_at(32))
    assert refused is not None and refused.store_parent == sequence.stored.parent == (key_at(16), 16)
    follower = sequence_of(snapshots)
    snapshots.attach(follower)
    assert (follower.reuse.cached_tokens, follower.stored.parent) == (32, (key_at(16), 16))
    refused.stored = True
    follower = sequence_of(snapshots)
    snapshots.attach(follower)
    assert follower.stored.parent == (key_at(32), 32) and snapshots.num_read == 1, "one snapshot, though read twice"
    gone = Snapshot(key_at(32), 32, 5, NO_PAGES)
    before = list(disk.saved)
    for one in (snapshots, OwnSnapshots()):
        sequence.stored.rolling = gone
        one.complete(sequence)
    assert disk.saved == before == [(16, None), (32, (key_at(16), 16))]


def test_what_the_store_refused_is_offered_again_while_it_is_in_memory() -> None:
    """Fault: a snapshot that found the queue full is lost although it is still there, one that was taken is offered
    twice, or one whose slot has another state by now is written."""
    disk = Disk({})
    snapshots = OwnSnapshots(disk)
    sequence = sequence_of(snapshots)
    disk.takes = False
    write(snapshots, sequence, 16, 32, 48)
    snapshots.pool.drop(*(one for one in snapshots.pool if one.position == 32))
    disk.saved.clear()
    for _ in range(2):
        snapshots.offer_again()
        assert disk.saved == [(16, None), (48, None)]
    OwnSnapshots().offer_again()


def test_only_an_ended_answer_that_is_kept_is_covered() -> None:
    """Catches an ideal that counts an answer nobody keeps, and unique tokens counted without the answer, or with one
    that is thrown away."""
    for keep_answer in (True, False):
        snapshots = OwnSnapshots()
        sequence = sequence_of(snapshots, keep_answer=keep_answer)
        for token in range(10):
            sequence.append(token, 0.0)
        sequence.computed = 59
        snapshots.complete(sequence)
        assert snapshots.coverage.num_tokens == (59 if keep_answer else 0)
        snapshots.coverage.insert(sequence.tokens[:60])
        snapshots.count_unique(sequence)
        assert snapshots.coverage.unique_tokens == (59 if keep_answer else 50)


def test_what_will_be_resumed_from_is_prefetched_once() -> None:
    """Catches a read of what is in memory, of what a plan does not resume from, or a look into the store for each
    step."""
    disk = Disk({16: "snapshot", 32: "snapshot"})
    snapshots = OwnSnapshots(disk, "planned")
    plans = [RequestPlan(resume_at=48), RequestPlan(resume_at=32), RequestPlan(resume_at=16), None]
    waiting = [sequence_of(snapshots, plan=plan) for plan in plans]
    waiting.append(sequence_of(snapshots, PROMPT[:9]))
    for _ in range(2):
        snapshots.prefetch(waiting)
    assert [one.stored.prefetch_key for one in waiting] == [b"", key_at(32), key_at(16), key_at(32), b""]
    assert disk.prefetched == [[key_at(32), key_at(16), key_at(32)]] * 2 and len(disk.looked_up) == 5
    hold(snapshots, 32)
    snapshots.prefetch(waiting)
    assert disk.prefetched[-1] == [key_at(16)]
    on_host = Disk({16: "snapshot"}, prefetches=False)
    for one in (OwnSnapshots(on_host), OwnSnapshots()):
        one.prefetch([sequence_of(one)])
    assert not on_host.prefetched and not on_host.looked_up


def test_positions_and_snapshots_are_found_by_their_tokens() -> None:
    """Catches a boundary that is named twice or missing, a snapshot of other tokens, and awaited snapshots evicted for
    somebody who looks."""
    disk = Disk({32: "snapshot", 48: Stranded(16)})
    snapshots = OwnSnapshots(disk)
    hold(snapshots, 16)
    tokens = np.array(PROMPT, np.int32)
    assert snapshots.positions(tokens) == [16, 32, 48] and snapshots.positions(tokens[:47]) == [16, 32]
    first, second = snapshots.fetch(tokens[:16]), snapshots.fetch(tokens[:32])
    assert first is not None and second is not None and (first.position, second.position) == (16, 32)
    assert snapshots.fetch(tokens[:48]) is None
    assert [load[:2] for load in disk.loads] == [(32, False), (48, False)]
    memory = OwnSnapshots()
    hold(memory, 32)
    assert memory.positions(tokens) == [32] and memory.fetch(tokens[:16]) is None
