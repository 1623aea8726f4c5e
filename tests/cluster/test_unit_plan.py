"""Who reads which import and who makes which export, in units written by hand."""

from __future__ import annotations

from apcbatch.cluster.unit import Piece, Unit
from apcbatch.cluster.unit_plan import Maker, UnitPlan
from apcbatch.cluster.wire import take_apart
from apcbatch.prefix import prefix_key
from apcbatch.types import Request, RequestPlan

FINGERPRINT = b"f"
TOKENS = list(range(1, 11))
AT_4, AT_8 = (prefix_key(FINGERPRINT, TOKENS, position) for position in (4, 8))


def unit(*plans: RequestPlan | None, exports: tuple[bytes, ...] = (), imports: tuple[bytes, ...] = ()) -> Unit:
    """Requests 100, 101, .. with the same prompt."""
    pieces = [Piece(100 + n, take_apart(Request("r", TOKENS)), plan) for n, plan in enumerate(plans)]
    return Unit(1, tuple(pieces), frozenset(exports), imports)


def test_a_state_that_is_made_again_has_readers_of_its_own() -> None:
    """Catches an import that is held for those who wait for a later copy, and an export that is told of the wrong
    one."""
    reader, again = RequestPlan(resume_at=8), RequestPlan(resume_at=4, keep=(8,), reads=(1,))
    plan = UnitPlan(unit(reader, None, reader, again, reader, exports=(AT_8,), imports=(AT_8, AT_4)), FINGERPRINT)
    assert (plan.readers(AT_8), plan.position(AT_8)) == ([0, 2], 8)
    assert (plan.readers(AT_4), plan.position(AT_4)) == ([3], 4)
    assert plan.makers == {AT_8: Maker(103, 8)}
    assert plan.plans[3] == RequestPlan(resume_at=4, keep=(8,), reads=(2,)), "one in the unit, and the export"
    assert plan.plans[:3] == [reader, None, reader]


def test_only_the_first_maker_holds_an_export() -> None:
    """Catches a second maker whose snapshot is held for an export that was told already."""
    both = RequestPlan(keep=(4, 8), reads=(0, 1))
    plan = UnitPlan(unit(both, both, exports=(AT_4,)), FINGERPRINT)
    assert plan.plans == [RequestPlan(keep=(4, 8), reads=(1, 1)), both]
    assert plan.makers == {AT_4: Maker(100, 4)}


def test_without_an_import_the_first_reader_makes_it() -> None:
    """Catches readers that each compute it, one that waits for itself, and a snapshot that nobody reads."""
    plan = UnitPlan(unit(RequestPlan(4, keep=(8,), reads=(3,)), RequestPlan(4), imports=(AT_4,)), FINGERPRINT)
    plan.go_without(AT_4)
    assert plan.plans == [RequestPlan(0, keep=(4, 8), reads=(1, 3)), RequestPlan(4)]
    single = UnitPlan(unit(RequestPlan(4, keep=(8,), reads=(3,)), imports=(AT_4,)), FINGERPRINT)
    single.go_without(AT_4)
    assert single.plans == [RequestPlan(0, keep=(8,), reads=(3,))]
