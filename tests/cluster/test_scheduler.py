"""Which group a worker gets next."""

from __future__ import annotations

from apcbatch.cluster.scheduler import GroupScheduler
from apcbatch.cluster.tasks import Group, Item, State
from apcbatch.types import Request


def group_of(number: int, seconds: float, is_alone: bool = False, resume: State | None = None) -> Group:
    item = Item(number, Request("r", [1]), resume, seconds=seconds)
    if resume is not None:
        resume.readers.add(item)
    return Group([item], is_alone=is_alone)


def test_which_group_is_next() -> None:
    """Fault: a long path waits for a shorter one, or the plan's order is lost among equals."""
    scheduler = GroupScheduler()
    for number, seconds in enumerate((1.0, 3.0, 2.0, 3.0)):
        scheduler.add(group_of(number, seconds))
    taken = [scheduler.take("node", is_idle=False) for _ in range(4)]
    assert [group and group.number for group in taken] == [1, 3, 2, 0] and scheduler.take("node", is_idle=True) is None


def test_nearly_equal_groups_go_where_their_states_are() -> None:
    """Fault: each state is sent, although as good a group needs one that is at hand; or a long path waits for a group
    whose state is."""
    scheduler = GroupScheduler()
    for number, (seconds, num_bytes) in enumerate([(10.0, 5), (8.0, 7), (7.9, 9), (9.0, 6)]):
        state = State(b"", 1, 0, 0, None, None, handle="held", num_bytes=num_bytes, nodes={"near"})
        scheduler.add(group_of(number, seconds, resume=state))
    taken = [scheduler.take(node, is_idle=True) for node in ("far", "near", "near", "near")]
    assert [group and group.number for group in taken] == [0, 2, 1, 3]


def test_a_group_that_runs_alone_waits_for_an_idle_worker() -> None:
    """Fault: a unit that is to run alone goes to a worker that has others, or waits for those when one is idle."""
    scheduler = GroupScheduler()
    for number, is_alone in enumerate((True, False, True)):
        scheduler.add(group_of(number, 1.0 + number, is_alone))
    taken = [scheduler.take("node", is_idle) for is_idle in (False, False, True, False, True)]
    assert [group and group.number for group in taken] == [1, None, 0, None, 2] and not scheduler.num_ready


def test_a_state_that_was_lost_is_made_by_the_first_group_that_needs_it() -> None:
    """Fault: a group goes to a worker without a state that was lost while it was ready, or each group makes it."""
    above = State(b"a", 1, 0, 0, None, None, handle="held")
    state = State(b"b", 2, 0, 0, None, above, handle="held")
    scheduler, groups = GroupScheduler(), [group_of(number, 1.0, resume=state) for number in (1, 2)]
    for group in groups:
        scheduler.add(group)
    state.handle = None
    assert scheduler.take("node", is_idle=True) is groups[0]
    [maker] = groups[0].items
    assert (state.maker, maker.resume, maker.keeps) == (maker, above, {2: state}) and maker in above.readers
    assert scheduler.take("node", is_idle=True) is None and list(scheduler.waiting) == [groups[1]]
    state.handle = "held again"
    scheduler.made(state)
    assert scheduler.take("node", is_idle=True) is groups[1] and not list(scheduler)
