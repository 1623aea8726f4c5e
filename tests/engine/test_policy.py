"""What each policy keeps, pending and waits for, and who owes which boundary."""

from __future__ import annotations

from dataclasses import replace

from apcbatch.engine.coverage import Match
from apcbatch.engine.pending import PendingSnapshots
from apcbatch.engine.policy import Retention, keeps_snapshots, retention_of
from apcbatch.types import POLICIES, Policy, Request, RequestPlan
from tests.effort import table

PROMPT, LENGTH, BLOCK = 300, 400, 64  # 300 tokens of prompt, 100 of the answer
FORKED = Match(200, True, True)
PLAN = RequestPlan(
    resume_at=64, keep=(128, 256), reads=(1, 2), keep_for_later=(192, 256), ideal=90, live_bytes=5, keep_bytes=7
)


def retention(policy: Policy, plan: RequestPlan | None = None, keep_answer: bool = True) -> Retention:
    request = Request("r", [1] * PROMPT, keep_answer=keep_answer, plan=plan)
    return retention_of(policy, request, PROMPT, BLOCK)


def keys_of(one: Retention) -> dict[int, bytes]:
    """A key for each position that matters, the same for every request."""
    return {position: b"%d" % position for position in one.key_positions()}


@table("policy, of_prompt, of_answer, replaced", [
    ("all", [64, 128, 192, 256], [320, 384], False), ("last", [256], [320, 384], True),
    ("planned", [192, 256], [320, 384], True), ("none", [], [], False),
])  # fmt: skip
def test_without_a_plan(policy: Policy, of_prompt: list[int], of_answer: list[int], replaced: bool) -> None:
    """Catches a policy that keeps another one's boundaries, or an answer whose snapshots pile up."""
    one = retention(policy)
    one.saw_fork(192)
    assert list(one.kept(0, PROMPT)) == list(one.pending_at_begin(0)) == of_prompt
    assert list(one.kept(PROMPT, LENGTH)) == of_answer
    assert list(one.kept_at_once(192, PROMPT)) == [position for position in of_prompt if position > 192]
    assert (list(one.kept_if_room(0, LENGTH)), list(one.pending_at_submission())) == ([], [])
    assert [one.supersedes(position) for position in (256, 320)] == [False, replaced]
    assert one.is_stored(256) and one.is_for_this_run(256) and not one.is_for_later(256)
    assert one.counts_on(256) and one.reads(256) == 0
    assert list(one.key_positions()) == ([] if policy == "none" else [64, 128, 192, 256])
    assert list(retention(policy, keep_answer=False).kept(PROMPT, LENGTH)) == []


def test_only_a_fork_that_was_seen_is_kept() -> None:
    """Catches a boundary kept for a fork at the very beginning, or for none."""
    one = retention("planned")
    assert list(one.kept(0, PROMPT)) == [256]
    one.saw_fork(0)
    assert list(one.kept(0, PROMPT)) == [256]


@table("policy", ["all", "last", "planned"])
def test_a_plan_decides_under_every_policy_that_keeps(policy: Policy) -> None:
    """Catches a plan that is not followed where requests without one run beside it."""
    one = retention(policy, PLAN)
    assert list(one.kept(0, LENGTH)) == list(one.pending_at_submission()) == [128, 192, 256]
    assert list(one.kept_at_once(0, LENGTH)) == [128, 256]
    assert list(one.kept_if_room(0, LENGTH)) == [192]
    assert list(one.pending_at_begin(0)) == []
    assert list(one.key_positions()) == [64, 128, 192, 256]
    assert [one.reads(position) for position in (64, 128, 192, 256)] == [0, 1, 0, 2]
    assert [one.is_for_this_run(position) for position in (128, 192, 256)] == [True, False, True]
    assert [one.is_for_later(position) for position in (128, 192, 256)] == [False, True, True]
    assert [one.is_stored(position) for position in (128, 192, 256)] == [False, True, True]
    assert [one.counts_on(position) for position in (64, 128)] == [True, False]
    assert (one.plan.live_bytes, one.plan.keep_bytes) == (5, 7)


def test_none_keeps_nothing_of_a_plan() -> None:
    """Catches snapshots in an engine that has no room for any; the ideal is the plan's all the same."""
    one = retention("none", PLAN)
    assert (list(one.kept(0, LENGTH)), list(one.key_positions()), one.reads(128)) == ([], [], 0)
    assert one.ideal(FORKED).length == 90
    assert [policy for policy in POLICIES if not keeps_snapshots(policy)] == ["none"]


def test_the_ideal_leaves_a_token_to_compute() -> None:
    """Catches an ideal that no run could reach, and one called exact where a branch was dropped."""
    assert retention("all").ideal(FORKED) == FORKED
    assert retention("all").ideal(Match(PROMPT, False, False)) == Match(PROMPT - 1, False, False)
    assert retention("all", PLAN).ideal(Match(200, True, False)) == Match(90, True, True)
    assert not retention("all", replace(PLAN, is_ideal_exact=False)).ideal(Match(90, False, True)).exact


def test_without_a_plan_a_longer_prefix_is_waited_for() -> None:
    """Catches a wait for less than is there, for one's own whole prompt, or for what no request will publish."""
    one, pending = retention("all"), PendingSnapshots()
    keys = keys_of(one)
    one.follow(keys, lambda key: -1)
    assert not one.waits(keys, pending, lambda: 0)
    pending.add(3, [(64, b"64"), (192, b"192")])
    assert not one.waits(keys, pending, lambda: 192)
    assert one.waits(keys, pending, lambda: 128)
    pending.remove(3, 64)
    assert one.waits(keys, pending, lambda: 128)
    pending.remove(3)
    assert not one.waits(keys, pending, lambda: 128)
    exact = retention_of("all", Request("r", [1] * 64), 64, BLOCK)
    pending.add(4, [(64, b"64")])
    assert not exact.waits(keys_of(exact), pending, lambda: 0)


def test_with_a_plan_the_leader_is_waited_for() -> None:
    """Catches a follower that waits for another one's copy of its prefix, or for a request that came after it."""
    one, pending = retention("planned", PLAN), PendingSnapshots()
    keys = keys_of(one)
    for number in (3, 7):
        pending.add(number, [(64, b"64")])
    one.follow(keys, lambda key: max(pending.publishers(key)))
    pending.add(8, [(64, b"64")])
    pending.remove(3)
    assert one.waits(keys, pending, lambda: 64)
    pending.remove(7)
    assert not one.waits(keys, pending, lambda: 0)
    alone = retention("planned", PLAN)
    alone.follow(keys, lambda key: -1)
    assert not alone.waits(keys, pending, lambda: 0)


def test_promises_are_gone_when_they_are_kept() -> None:
    """Catches a boundary that others wait for although no request will publish it any more."""
    pending = PendingSnapshots()
    pending.add(1, [])
    pending.add(1, [(64, b"a"), (128, b"b")])
    pending.add(2, [(64, b"a")])
    assert (list(pending.publishers(b"a")), list(pending.publishers(b"b")), list(pending.publishers(None))) == (
        [1, 2],
        [1],
        [],
    )
    pending.remove(1, 127)
    assert (list(pending.publishers(b"a")), list(pending.publishers(b"b"))) == ([2], [1])
    pending.remove(1)
    pending.remove(1)
    pending.remove(9)
    assert (len(pending), list(pending.publishers(b"b"))) == (1, [])
    pending.remove(2)
    assert not pending


def test_the_longest_that_is_pending_lies_between_its_bounds() -> None:
    """Fault: a sequence waits for what it has already, or for what it may not resume from."""
    pending, keys = PendingSnapshots(), {position: b"%d" % position for position in (64, 128, 192, 256)}
    pending.add(3, [(position, keys[position]) for position in (64, 192, 256)])
    found = {(above, below): pending.longest(keys, above, below) for above in (0, 64, 191, 192) for below in (192, 256)}
    expected = {(0, 192): b"64", (0, 256): b"192", (64, 256): b"192", (191, 256): b"192"}
    assert {bounds: key for bounds, key in found.items() if key is not None} == expected
    assert pending.longest(keys, 0, 257) == b"256" and len(pending) == 3


def test_who_takes_over_publishes_under_the_number_of_the_failed_one() -> None:
    """Fault: a reader of a failed request's snapshot computes the prefix itself, or it waits for ever; or a reader of
    another request's does so."""
    pending = PendingSnapshots()
    pending.add(2, [(64, b"a"), (128, b"b")])
    pending.add(5, [(192, b"c")])
    pending.add(7, [(64, b"a")])
    pending.take_over(5, pending.remove(2))
    assert [pending.publishers(key) for key in (b"a", b"b", b"c", b"d")] == [{7: 7, 2: 5}, {2: 5}, {5: 5}, {}]
    assert pending.remove(5, 63) == [] and pending.remove(5, 64) == [(64, b"a", 2)]
    assert pending.publishers(b"a") == {7: 7}
    assert pending.remove(5) == [(128, b"b", 2), (192, b"c", 5)] and pending.remove(5) == []
    assert len(pending) == 1
