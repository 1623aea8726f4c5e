"""UnplannedQueue: requests without a plan stay with the worker of their conversation, are shared out and never lost."""

from __future__ import annotations

import random

import pytest

from apcbatch.cluster import scheduler
from apcbatch.cluster.scheduler import UnplannedQueue
from apcbatch.cluster.tasks import Item
from apcbatch.types import Request
from tests.effort import seeds


def item(number: int, conversation: int | None) -> Item:
    return Item(number, Request(str(number), [1], tag=conversation))


def by_conversation() -> UnplannedQueue:
    return UnplannedQueue(lambda request: request.tag)


def test_turns_that_wait_together_are_taken_in_order() -> None:
    """Catches a later turn that is taken before an earlier one where all turns of a conversation wait at once, as under
    a policy without a plan."""
    for seed in seeds(100):
        source, unplanned = random.Random(seed), by_conversation()
        turns = [conversation for conversation in range(12) for _ in range(source.randrange(1, 60))]
        for number, conversation in enumerate(turns):
            unplanned.add(item(number, conversation))
        taken: list[tuple[int, Item]] = []
        while len(unplanned):
            worker = source.randrange(3)
            if source.random() < 0.1:
                unplanned.forget_worker(worker)
            taken += [(worker, one) for one in unplanned.take(worker, 3)]
        assert sorted(one.number for _, one in taken) == list(range(len(turns)))
        for conversation in range(12):
            numbers = [one.number for _, one in taken if one.request.tag == conversation]
            assert numbers == sorted(numbers)


def test_conversations_stay_and_nothing_is_lost() -> None:
    """Catches a conversation that goes from worker to worker, and a request that is taken twice or never. A turn comes
    when the one before it was taken, as in a rollout."""
    for seed in seeds(100):
        source, unplanned, number = random.Random(seed), by_conversation(), 0
        owners: dict[int, int] = {}
        taken: list[Item] = []
        open_turns = {conversation: source.randrange(1, 6) for conversation in range(20)}
        waiting: set[int] = set()
        while any(open_turns.values()) or len(unplanned):
            for conversation in source.sample(sorted(open_turns), 5):
                if open_turns[conversation] and conversation not in waiting:
                    waiting.add(conversation)
                    open_turns[conversation] -= 1
                    unplanned.add(item(number, conversation))
                    number += 1
            worker = source.randrange(4)
            for one in unplanned.take(worker, 4):
                taken.append(one)
                waiting.remove(one.request.tag)
                assert owners.setdefault(one.request.tag, worker) == worker
        assert sorted(one.number for one in taken) == list(range(number))
        for conversation in range(20):
            turns = [one.number for one in taken if one.request.tag == conversation]
            assert turns == sorted(turns)


def test_what_a_lost_worker_had_goes_to_others() -> None:
    """Catches requests that wait for a worker that is gone, before and after they are submitted."""
    unplanned = by_conversation()
    for number in range(6):
        unplanned.add(item(number, number))
    first = unplanned.take(1, 1)
    assert len(first) == 6
    for number in range(6, 9):
        unplanned.add(item(number, number - 6))  # the next turns wait for worker 1
    assert unplanned.take(2, 2) == [] and len(unplanned) == 3
    unplanned.forget_worker(1)
    unplanned.add(item(9, 3))  # its conversation was worker 1's too
    assert [one.number for one in unplanned.take(2, 1)] == [6, 7, 8, 9] and not len(unplanned)


def test_requests_that_stand_alone_go_anywhere() -> None:
    """Catches None taken for a conversation, which would bind all of them to one worker."""
    unplanned = by_conversation()
    for number in range(8):
        unplanned.add(item(number, None))
    assert unplanned.take(1, 4) and unplanned.take(2, 4)
    rest = unplanned.clear()
    assert rest and not len(unplanned) and unplanned.take(3, 1) == []


def test_the_oldest_conversation_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the worker of the latest conversation is forgotten, so that it goes where its states are not."""
    monkeypatch.setattr(scheduler, "MOST_CONVERSATIONS", 2)
    for conversation, is_forgotten in ((0, True), (1, False), (2, False)):
        unplanned = by_conversation()
        for number in range(3):
            unplanned.add(item(number, number))
            assert [one.number for one in unplanned.take(7, 1)] == [number]
        unplanned.add(item(3, conversation))
        assert len(unplanned.take(8, 1)) == is_forgotten and len(unplanned.take(7, 1)) == (not is_forgotten)


def test_a_share_of_the_new_ones_is_taken() -> None:
    """Catches a share that is rounded down to nothing, or is larger than a unit."""
    for waiting, workers, taken in [
        (10, 4, 3), (8, 4, 2), (1, 4, 1), (5, 0, 5), (64, 2, 32), (100, 2, 32), (40, 4, 10),
    ]:  # fmt: skip
        unplanned = by_conversation()
        for number in range(waiting):
            unplanned.add(item(number, None))
        assert [one.number for one in unplanned.take(1, workers)] == [*range(taken)]


def test_new_ones_are_taken_up_to_the_share() -> None:
    """Fault: a worker whose own conversations make more than its share gets new ones too, or none up to its share."""
    for own, new, taken in [(8, 0, 8), (8, 8, 8), (4, 4, 4), (2, 14, 8)]:
        unplanned = by_conversation()
        for number in range(own):
            unplanned.add(item(number, number))
        assert len(unplanned.take(1, 1)) == own
        for number in range(own + new):
            unplanned.add(item(own + number, number))
        assert [one.number for one in unplanned.take(1, 2)] == [*range(own, own + taken)]
