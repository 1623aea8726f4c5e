"""Which snapshot goes when room is needed, what that frees, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from apcbatch.engine import pool as pool_module
from apcbatch.engine.page_tables import PageTables
from apcbatch.engine.pool import NO_PAGES, PagePool, Snapshot, SnapshotPool
from apcbatch.engine.sequence import Sequence, make_sequence
from apcbatch.types import Request
from tests.effort import table
from tests.engine.test_given_back import free_slots

SLOT, PAGE = 100, 10


class Shelf:
    """A pool with room for `slots` states and `pages` pages' bytes, and short ways to fill it."""

    def __init__(
        self, slots: int, pages: int = 0, num_slots: int = 20, finish_writes: Callable[[], bool] = lambda: False
    ) -> None:
        self.pages = PagePool(20)
        self.pool = SnapshotPool(range(num_slots), self.pages, SLOT, PAGE, slots * SLOT + pages * PAGE, finish_writes)

    def put(self, name: str, pages: list[int] | None = None, reads: int = 0) -> Snapshot | None:
        slot = self.pool.reserve(name.encode(), reads > 0)
        if slot is None:
            return None
        own = np.array(pages, np.int64) if pages is not None else NO_PAGES
        return self.pool.insert(name.encode(), 7, slot, own, reads, reads > 0)

    @property
    def names(self) -> str:
        """What is held, the first to go first."""
        return b"".join(one.key for one in self.pool).decode()


def test_the_least_recently_consumed_goes_first_and_room_is_used_to_the_last_byte() -> None:
    """Catches a pool that drops one too early or too late, or one that was just resumed from."""
    shelf = Shelf(slots=3)
    a, b, _ = (shelf.put(name) for name in "abc")
    assert (shelf.names, shelf.pool.held_bytes, shelf.pool.evicted) == ("abc", 3 * SLOT, 0)
    shelf.pool.consume(a)
    assert a.was_read and not b.was_read
    shelf.put("d")
    assert (shelf.names, shelf.pool.evicted, shelf.pool.peak_held) == ("cad", 1, 3)
    assert shelf.pool.was_dropped(b"b") and not shelf.pool.was_dropped(b"a") and not shelf.pool.was_dropped(b"x")
    assert shelf.pool.peek(b"b") is None and not shelf.pool.holds(b) and shelf.pool.holds(a)
    assert b"a" in shelf.pool and b"b" not in shelf.pool and len(shelf.pool) == 3
    shelf.put("b")
    assert not shelf.pool.was_dropped(b"b") and not shelf.pool.holds(b), "another snapshot of the same key"
    shelf.pool.drop(a)
    assert shelf.pool.evicted == 2 and not shelf.pool.was_dropped(b"a"), "evicted are those for lack of room"


def test_slots_may_be_short_too() -> None:
    """Catches a slot that is handed out twice, and an error where there are fewer slots than bytes for them."""
    shelf = Shelf(slots=10, num_slots=2)
    slots = [shelf.put(name).slot for name in "ab"]
    assert sorted(slots) == [0, 1]
    assert shelf.put("c").slot == slots[0]
    assert shelf.names == "bc"


def test_what_is_pinned_or_awaited_stays() -> None:
    """Catches a snapshot dropped while it is read, one that a plan waits for dropped for one without a reader, and
    one dropped in place of another awaited one although an idle one is there."""
    shelf = Shelf(slots=3)
    a, _, _ = shelf.put("a"), shelf.put("b", reads=1), shelf.put("c", reads=2)
    a.pins += 1
    assert shelf.put("d") is None and shelf.pool.was_dropped(b"d")
    assert (shelf.names, shelf.pool.evicted, shelf.pool.num_reserved) == ("abc", 0, 0)
    assert shelf.put("e", reads=1) is not None
    assert shelf.names == "ace" and shelf.pool.was_dropped(b"b")
    a.pins -= 1
    shelf.put("f", reads=1)
    assert shelf.names == "cef"
    for snapshot in shelf.pool:
        snapshot.pins += 1
    assert shelf.put("g", reads=1) is None and not shelf.pool.drop_one(True)
    assert shelf.names == "cef"


@table("awaited", [False, True])
def test_writes_are_waited_for_before_an_awaited_one_goes(awaited: bool) -> None:
    """Catches an awaited snapshot dropped, or nothing dropped, where only a write held back an idle one; and waiting
    for writes while there is another idle one."""
    waited = []

    def finish_writes() -> bool:
        waited.append(1)
        shelf.pool.peek(b"b").pins = 0
        return True

    shelf = Shelf(slots=3, finish_writes=finish_writes)
    shelf.put("a", reads=1)
    shelf.put("b").pins += 1
    shelf.put("c")
    assert shelf.pool.drop_one(awaited) and shelf.names == "ab" and not waited
    assert shelf.pool.drop_one(awaited) and shelf.names == "a" and len(waited) == 1


def test_pages_are_counted_once_and_freed_by_the_last_holder() -> None:
    """Catches a page that is counted for each snapshot, freed while one refers to it, or never."""
    shelf = Shelf(slots=5, pages=5)
    pages = [shelf.pages.allocate() for _ in range(3)]
    shelf.put("a", pages[:2])
    shelf.put("b", pages)
    assert shelf.pages.release(np.array(pages)) == 0, "the pool holds its own references"
    assert shelf.pool.held_bytes == 2 * SLOT + 3 * PAGE
    shelf.pool.drop(shelf.pool.peek(b"b"))
    assert (shelf.pool.held_bytes, shelf.pages.num_free) == (SLOT + 2 * PAGE, 18)
    assert shelf.pool.evicted == 0 and not shelf.pool.was_dropped(b"b"), "released, not evicted"
    shelf.pool.drop(shelf.pool.peek(b"a"))
    assert (shelf.pool.held_bytes, shelf.pages.num_free) == (0, 20)


def test_a_snapshot_whose_pages_do_not_fit_pushes_others_out_or_is_refused() -> None:
    """Catches bytes beyond the capacity, or a snapshot that pushes itself out."""
    shelf = Shelf(slots=2, pages=3)
    page = [shelf.pages.allocate() for _ in range(8)]
    shelf.put("a", page[:2])
    assert shelf.put("b", page[2:5]) is not None
    assert (shelf.names, shelf.pool.held_bytes) == ("b", SLOT + 3 * PAGE)
    shelf.pool.peek(b"b").pins += 1
    assert shelf.put("c", page[5:]) is None
    assert shelf.names == "b" and shelf.pool.was_dropped(b"c") and shelf.pool.evicted == 2
    assert (shelf.pool.num_reserved, len(free_slots(shelf.pool)), shelf.pool.peak_held) == (0, 19, 1)
    exactly = Shelf(slots=1, pages=3)
    page = [exactly.pages.allocate() for _ in range(4)]
    assert exactly.put("a", page[:3]) is not None
    assert exactly.put("b", page) is None


def test_a_key_that_is_held_keeps_its_first_copy() -> None:
    """Catches a second copy of a snapshot, a slot that is lost with it, and readers that are not added up."""
    shelf = Shelf(slots=3)
    first = shelf.put("a", reads=2)
    slot = shelf.pool.reserve(b"a", True)
    assert shelf.pool.held_bytes == 2 * SLOT, "what is reserved counts"
    assert shelf.pool.insert(b"a", 7, slot, NO_PAGES, 3, True) is first
    assert (first.reads_left, shelf.pool.held_bytes, shelf.pool.num_reserved) == (5, SLOT, 0)
    assert len(free_slots(shelf.pool)) == 19


def test_what_is_cancelled_gives_its_room_back() -> None:
    """Catches room lost with each pass that fails."""
    shelf = Shelf(slots=1)
    for awaited in (False, True):
        shelf.pool.cancel(b"a", shelf.pool.reserve(b"a", awaited))
    assert (shelf.pool.held_bytes, len(free_slots(shelf.pool))) == (0, 20)
    assert shelf.put("a") is not None


def test_an_awaited_one_takes_the_slot_that_a_pass_under_way_writes_for_nobody() -> None:
    """Fault: with several passes under way, what future runs get was kept in the place of what this run waits for. Also
    catches a slot that is taken within one pass, which would write it twice, and one that is given back twice."""
    shelf = Shelf(slots=2)
    a, b = (shelf.pool.reserve(name, awaited=False) for name in (b"a", b"b"))
    assert shelf.pool.reserve(b"c", awaited=True) is None, "their pass has not begun"
    shelf.pool.passes_begun()
    assert shelf.pool.reserve(b"d", awaited=False) is None
    taken = [shelf.pool.reserve(name, awaited=True) for name in (b"e", b"f")]
    assert sorted(taken) == sorted([a, b]) and shelf.pool.reserve(b"g", awaited=True) is None
    assert shelf.pool.was_dropped(b"a") and shelf.pool.was_dropped(b"b")
    assert shelf.pool.insert(b"a", 7, a, NO_PAGES) is None
    shelf.pool.cancel(b"b", b)
    assert (shelf.pool.num_reserved, len(shelf.pool), len(free_slots(shelf.pool))) == (2, 0, 18)
    assert shelf.pool.insert(b"e", 7, taken[0], NO_PAGES, 1, True).slot == taken[0]
    shelf.pool.cancel(b"f", taken[1])
    assert (shelf.names, shelf.pool.num_reserved, len(free_slots(shelf.pool))) == ("e", 0, 19)
    assert {shelf.pool.reserve(b"h", awaited=True) for _ in range(2)} == {a, b}, "no pass is under way: e goes"
    for name, slot in ((b"a", a), (b"b", b)):
        assert shelf.pool.insert(name, 7, slot, NO_PAGES) is not None, "it is another reservation"
    idle = shelf.pool.reserve(b"i", awaited=False)
    shelf.pool.passes_begun()
    assert shelf.pool.insert(b"i", 7, idle, NO_PAGES) is not None and shelf.names == "bi"
    reserved = [shelf.pool.reserve(name, awaited=True) for name in (b"j", b"k", b"l")]
    assert None not in reserved[:2] and reserved[2] is None, "what was published is written no more"


def test_an_awaited_one_does_not_give_way_to_what_is_not_published_yet() -> None:
    """Catches an awaited snapshot refused for want of room that only slots for the idle take: they may go later."""
    shelf = Shelf(slots=2, pages=1)
    page = [shelf.pages.allocate() for _ in range(2)]
    idle = shelf.pool.reserve(b"i", False)
    slot = shelf.pool.reserve(b"a", True)
    assert shelf.pool.insert(b"a", 7, slot, np.array(page), 1, True) is not None
    assert shelf.pool.held_bytes == 2 * SLOT + 2 * PAGE
    assert shelf.pool.insert(b"i", 7, idle, NO_PAGES) is None, "it is the idle one that finds no room"
    assert shelf.names == "a" and shelf.pool.held_bytes <= shelf.pool.capacity_bytes


def test_only_so_many_dropped_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a memory of dropped keys that grows with the run, or forgets the newest."""
    monkeypatch.setattr(pool_module, "FORGOTTEN_KEYS", 3)
    shelf = Shelf(slots=1)
    for name in "abcdef":
        shelf.put(name)
    assert [shelf.pool.was_dropped(name.encode()) for name in "abcdef"] == [False, False, True, True, True, False]


def test_snapshots_go_until_enough_pages_are_free() -> None:
    """Catches a snapshot dropped for pages that are there, or where no drop could help, and an awaited one dropped for
    a sequence that could wait."""
    shelf, arena = Shelf(slots=3, pages=8), None
    pages = np.array([shelf.pages.allocate() for _ in range(6)])
    shelf.put("a", pages[:3].tolist())
    shelf.put("b", pages[3:].tolist(), reads=1)
    shelf.pages.release(pages)
    tables = PageTables(shelf.pages, shelf.pool, arena, has_kv=True)  # type: ignore[arg-type]
    assert not tables.free(21, awaited=True) and tables.free(14, awaited=True) and shelf.names == "ab"
    assert tables.free(15, awaited=False) and shelf.names == "b"
    assert not tables.free(18, awaited=False) and shelf.names == "b"
    assert tables.free(18, awaited=True) and shelf.names == "" and shelf.pages.num_free == 20


def test_running_requests_hold_at_most_the_pools_size_beside_the_snapshots() -> None:
    """Fault: they fill the pages that the plan counts for snapshots, whose slots come on top; or a request that runs
    alone, or pages that snapshots have anyway, count against them."""
    shelf = Shelf(slots=3, pages=4)
    most = shelf.pages.num_pages // 2 + 1
    tables = PageTables(shelf.pages, shelf.pool, None, has_kv=True)  # type: ignore[arg-type]
    assert tables.free_for_running(most, alone=False) and not tables.free_for_running(most + 1, alone=False)
    assert tables.free_for_running(most + 1, alone=True) and not tables.free_for_running(2 * most, alone=True)
    own = np.array([shelf.pages.allocate() for _ in range(3)])
    assert tables.free_for_running(most - 3, alone=False) and not tables.free_for_running(most - 2, alone=False)
    shelf.put("a", own[:2].tolist(), reads=1)
    assert tables.free_for_running(most - 1, alone=False) and not tables.free_for_running(most, alone=False)


def test_pages_are_handed_out_once() -> None:
    """Catches a page that two get, or one that is freed while it is shared."""
    pages = PagePool(3)
    own = np.array([pages.allocate() for _ in range(3)])
    assert sorted(own.tolist()) == [0, 1, 2] and pages.num_free == 0
    pages.share(own[:2])
    assert pages.release(own) == 1 and pages.num_free == 1
    assert pages.allocate() == own[2]
    assert pages.release(own[:2]) == 2 and pages.num_free == 2
    with pytest.raises(IndexError):
        for _ in range(3):
            pages.allocate()


class Copied:
    """An arena that notes which page was copied to which."""

    def __init__(self) -> None:
        self.pages: list[tuple[int, int]] = []

    def copy_page(self, source: int, target: int) -> None:
        self.pages.append((source, target))


def tables_of(num_pages: int, has_kv: bool = True) -> tuple[PageTables, PagePool, Copied]:
    pages, arena = PagePool(num_pages), Copied()
    pool = SnapshotPool(range(4), pages, SLOT, PAGE, 1000, lambda: False)
    return PageTables(pages, pool, arena, has_kv), pages, arena  # type: ignore[arg-type]


def sequence_of(length: int, max_tokens: int = 1, answers: int = 1) -> Sequence:
    request = Request("r", [1] * length, max_tokens=max_tokens, n=answers, temperature=1.0)
    return make_sequence(request, 9, None)


@table(
    "length, max_tokens, answers, by_fork, to_start, to_end",
    [
        (63, 1, 1, 1, 2, 2),
        (64, 1, 1, 1, 3, 3),
        (64, 64, 1, 1, 3, 3),
        (64, 65, 3, 2, 4, 4),  # the answers share the prompt's only page
        (65, 63, 3, 1, 4, 4),  # and here each has a copy of its second page
        (128, 1, 3, 1, 4, 4),
        (130, 126, 3, 2, 6, 6),
        (130, 200, 3, 3, 7, 8),  # 128 new tokens to start
        (128, 1000, 1, 2, 5, 19),
    ],
)
def test_a_sequence_starts_with_pages_for_its_first_tokens(
    length: int, max_tokens: int, answers: int, by_fork: int, to_start: int, to_end: int
) -> None:
    """Fault: a sequence waits for pages that it will hardly use; it begins, and lacks a page even if it runs alone; or
    one that would have fitted never begins."""
    tables, pages, _ = tables_of(to_end)
    sequence = sequence_of(length, max_tokens, answers)
    assert (tables.needed_by_fork(sequence), tables.needed_to_start(sequence)) == (by_fork, to_start)
    assert tables.fits(sequence) and not tables_of(to_end - 1)[0].fits(sequence)
    tables.reserve(sequence)
    assert len(sequence.pages) == -(-(length + min(max_tokens, 128)) // 64)
    held = Snapshot(b"", length, 0, sequence.pages)
    tables.trim(held)
    assert len(held.pages) == -(-length // 64) == pages.num_pages - pages.num_free
    none, _, _ = tables_of(0, has_kv=False)
    assert (none.needed_to_start(sequence), none.needed_by_fork(sequence), none.fits(sequence)) == (0, 0, True)


def test_pages_are_added_as_tokens_come() -> None:
    """Fault: a page too many or too few, counted or not; or one that its sequence does not give back."""
    tables, pages, _ = tables_of(5)
    sequence = sequence_of(200)
    added = []
    for end in (1, 64, 65, 200, 64):
        added.append(tables.missing(sequence, end))
        tables.extend(sequence, end)
    assert added == [1, 0, 1, 2, 0]
    assert sequence.pages.tolist() == [0, 1, 2, 3] and sequence.pages.dtype == np.int64
    assert [tables.covering(sequence, position).tolist() for position in (64, 65)] == [[0], [0, 1]]
    tables.release(sequence)
    assert pages.num_free == 5 and len(sequence.pages) == 0


@table(
    "position, held, own, copied",
    [(128, 2, [0, 1], []), (100, 2, [0, 2], [(1, 2)]), (10, 1, [1], [(0, 1)]), (0, 0, [], [])],
)
def test_a_restored_sequence_shares_full_pages(
    position: int, held: int, own: list[int], copied: list[tuple[int, int]]
) -> None:
    """Fault: a sequence writes into the page of a snapshot, or a full page is copied."""
    tables, pages, arena = tables_of(5)
    snapshot = Snapshot(b"a", position, 0, np.array([pages.allocate() for _ in range(held)], np.int64))
    sequence, before = sequence_of(200), snapshot.pages.tolist()
    tables.adopt(sequence, snapshot)
    assert (sequence.pages.tolist(), arena.pages, snapshot.pages.tolist()) == (own, copied, before)
    tables.release(snapshot)
    assert pages.num_free == 5 - len(own)
    tables.release(sequence)
    assert pages.num_free == 5
