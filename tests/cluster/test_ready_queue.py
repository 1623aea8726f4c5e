"""Which group a worker gets next."""

from __future__ import annotations

from apcbatch.cluster.scheduler import ReadyQueue
from apcbatch.cluster.tasks import Group, Item, State
from apcbatch.types import Request

NEAR, FAR, WHOLE = "near", "far", float("inf")


def group_of(number: int, priority: float, num_bytes: int = 0, num_made: int = 0, is_alone: bool = False) -> Group:
    """A group that needs a state of this size, which the node `near` holds."""
    state = State(b"", 1, 0, 1, None, None, num_bytes=num_bytes, nodes={NEAR})
    one = Group([Item(number, Request("r", [1]))], needs={state: 1}, num_made=num_made, is_alone=is_alone)
    one.priority = priority
    return one


def test_which_group_is_next() -> None:
    """Fault: a long path waits for one whose states are at hand, or each state is sent although as good a group needs
    none that is elsewhere; seconds of groups that are gone count."""
    queue = ReadyQueue()
    for number, (priority, num_bytes) in enumerate([(10.0, 5), (8.0, 7), (7.9, 9), (9.0, 6)]):
        queue.push(group_of(number, priority, num_bytes))
    assert [queue.pop(NEAR).number for _ in range(4)] == [1, 3, 0, 2]
    for number in range(10):
        queue.push(group_of(number, 1.0, number))
    assert [queue.pop(NEAR).number for _ in range(3)] == [7, 8, 9], "eight are looked at"
    assert [queue.pop(FAR).number for _ in range(7)] == [*range(7)] and queue.pop(FAR) is None
    groups = [group_of(number, 1.0) for number in range(3)]
    for one, seconds in zip(groups, (1.0, 10.0, 8.5), strict=True):
        one.seconds = seconds
        queue.push(one)
    assert queue.seconds == 19.5 and queue.pop(NEAR) is groups[0] and queue.seconds == 18.5
    assert sorted(one.number for one in queue.clear()) == [1, 2] and queue.seconds == 0.0 and not len(queue)


def test_a_group_that_runs_alone_waits_for_an_idle_worker() -> None:
    """Fault: a unit that fills a worker by itself is given to one that is at work, or keeps the others from it."""
    queue = ReadyQueue()
    for number in range(7):
        queue.push(group_of(number, 2.0, is_alone=True))
    queue.push(group_of(7, 1.0))
    assert queue.pop(NEAR, is_idle=False).number == 7 and queue.pop(NEAR, is_idle=False) is None
    assert len(queue) == 7 and queue.pop(NEAR).number == 0
    for number in (0, 7, 8):
        queue.push(group_of(number, 2.0 if number != 8 else 1.0, is_alone=number != 8))
    assert queue.pop(NEAR, is_idle=False) is None and len(queue) == 9, "eight are looked at"


def test_what_makes_states_waits_for_room() -> None:
    """Fault: a node that is nearly full gets more states than fit, or a group that frees some is left."""
    queue = ReadyQueue()
    for number, made in enumerate((0, 3, 2, 1)):
        queue.push(group_of(number, 5.0 + number, num_made=made))
    assert queue.pop(NEAR, -1.0).number == 0, "it adds none"
    assert queue.pop(NEAR, 0.5) is None and queue.pop(NEAR, 1.0).number == 3
    assert queue.pop(NEAR, 1.9) is None and len(queue) == 2
    assert queue.pop(NEAR, 2.0).number == 2
    assert queue.pop(NEAR, -1.0) is None and queue.pop(NEAR, WHOLE).number == 1
    for number, future_readers in enumerate((1, 0)):
        frees = group_of(number, 5.0 - number)
        for state in frees.needs:
            state.readers, state.future_readers = {frees.items[0]}, future_readers
        queue.push(frees)
    assert queue.pop(NEAR, 1.0).number == 1, "of any priority, the one that frees a state"


def test_what_a_group_adds_to_the_states_that_are_held() -> None:
    """Fault: a state that others read later counts as freed, or one that nobody else reads does not."""
    needs = {}
    for num_readers, future_readers, here in ((1, 0, 1), (1, 1, 1), (3, 0, 2), (2, 0, 2)):
        state = State(b"", 1, 0, future_readers, None, None)
        state.readers = {Item(number, Request("r", [1])) for number in range(num_readers)}
        needs[state] = here
    assert Group([], needs=needs, num_made=5).growth == 5 - 2
