"""Which request of a unit reads which import, makes which export, and keeps what, in groups written by hand."""

from __future__ import annotations

from apcbatch.cluster.plan_view import pack, without_import
from apcbatch.cluster.tasks import Group, Item, State
from apcbatch.cluster.wire import Import, Unit
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Request, RequestPlan

TOKENS = list(range(1, 11))


def item(number: int, plan: RequestPlan | None, resume: State | None = None) -> Item:
    """A request; it is a reader of what it resumes from."""
    found = Item(number, Request("r", TOKENS, plan=plan), resume)
    if resume is not None:
        resume.readers.add(found)
    return found


def state(position: int, maker: Item | None = None, key: bytes = b"", future_readers: int = 0) -> State:
    """A state that is held, or one that a request makes."""
    made = State(key or b"at %d" % position, position, 0, future_readers, maker, None)
    if maker is None:
        made.handle = "handle"
    else:
        maker.keeps[position] = made
    return made


def unit_of(*items: Item, state_bytes: int = 1) -> Unit:
    return pack(1, Group(list(items)), Footprint(state_bytes), lambda request: request)[0]


def plans_of(unit: Unit) -> list[RequestPlan | None]:
    return [piece.plan for piece in unit.pieces]


def test_a_state_that_is_made_again_has_readers_of_its_own() -> None:
    """Catches an import that is held for those who wait for a later copy, and an export that is told of the wrong
    one."""
    reader, again = RequestPlan(resume_at=8), RequestPlan(resume_at=4, keep=(8,), reads=(1,))
    held, stem = state(8, key=b"at 8"), state(4)
    items = [item(100, reader, held), item(101, None), item(102, reader, held), item(103, again, stem)]
    copy = state(8, items[3], b"at 8", future_readers=1)
    unit = unit_of(*items, item(104, reader, copy))
    assert unit.imports == {b"at 8": Import(8, (0, 2)), b"at 4": Import(4, (3,))}
    assert unit.exports == {b"at 8"}
    plans = plans_of(unit)
    assert plans[3] is not None and (plans[3].resume_at, plans[3].keep, plans[3].reads) == (4, (8,), (2,))
    assert [plan and plan.resume_at for plan in plans] == [8, None, 8, 4, 8]


def test_only_the_first_maker_of_a_prefix_exports_it() -> None:
    """Catches a second maker whose snapshot is held for an export that was sent already."""
    items = [item(number, RequestPlan(keep=(4,), reads=(1,))) for number in (100, 101)]
    for one in items:
        state(4, one, future_readers=1)
    unit = unit_of(*items)
    assert unit.exports == {b"at 4"}
    assert [plan and (plan.keep, plan.reads) for plan in plans_of(unit)] == [((4,), (1,)), ((), ())]


def test_a_unit_needs_no_more_room_than_the_plan() -> None:
    """Catches a request that waits for room which the plan knows to be there, and one that is computed otherwise than
    planned and begins without the room that it takes in its unit."""
    for live, keep, lowest in [(99, 50, (99, 50)), (1000, 1000, (100, 100)), (0, 0, (0, 0))]:
        stem, lost = state(4), state(8)
        lost.handle = None
        first = item(100, RequestPlan(4, keep=(6,), reads=(1,), live_bytes=live, keep_bytes=keep), stem)
        made = state(6, first)
        second = item(101, RequestPlan(8, live_bytes=1, keep_bytes=1), lost)
        second.become_maker(lost)
        unit = unit_of(first, second, item(102, RequestPlan(6), made), state_bytes=100)
        assert unit.imports == {b"at 4": Import(4, (0,))}
        assert [plan and (plan.resume_at, plan.live_bytes, plan.keep_bytes) for plan in plans_of(unit)] == [
            (4, *lowest), (0, 100, 0), (6, 0, 0),
        ]  # fmt: skip


def test_without_an_import_the_first_reader_makes_it() -> None:
    """Catches readers that each compute it, one that waits for itself, and a snapshot that nobody reads."""
    plans: list[RequestPlan | None] = [RequestPlan(4, keep=(8,), reads=(3,)), RequestPlan(4)]
    without_import(plans, Import(4, (0, 1)))
    assert plans == [RequestPlan(0, keep=(4, 8), reads=(1, 3)), RequestPlan(4)]
    single: list[RequestPlan | None] = [RequestPlan(4, keep=(8,), reads=(3,))]
    without_import(single, Import(4, (0,)))
    assert single == [RequestPlan(0, keep=(8,), reads=(3,))]
