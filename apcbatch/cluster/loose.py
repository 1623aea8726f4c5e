"""Requests without a plan: rollouts, and policies that plan nothing. Those of one conversation go to one worker.

Must not know: units, states. Invariants: a request is taken once; the requests of a conversation are taken in order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

from apcbatch.cluster.items import Item
from apcbatch.cluster.seam import WorkerId
from apcbatch.types import Request

MOST_TOGETHER = 32  # in one unit
MOST_CONVERSATIONS = 1 << 17  # whose worker is remembered


class LooseItems:
    """Waiting requests, by the worker that served their conversation."""

    def __init__(self, conversation_of: Callable[[Request], Hashable]) -> None:
        """conversation_of: what the requests of one conversation have in common; None for a request that stands
        alone."""
        self._conversation_of = conversation_of
        self._worker_of: OrderedDict[Hashable, WorkerId] = OrderedDict()
        self._waiting: dict[WorkerId | None, deque[Item]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, item: Item) -> None:
        """A request waits."""
        worker = self._worker_of.get(self._conversation_of(item.request))
        self._waiting.setdefault(worker, deque()).append(item)
        self._num_waiting += 1

    def take(self, worker: WorkerId, num_workers: int) -> list[Item]:
        """What a worker is given now: its own conversations, then new ones, then those that another one has too many
        of."""
        most = max(1, min(MOST_TOGETHER, -(-self._num_waiting // max(1, num_workers))))
        taken = self._take_from(worker, MOST_TOGETHER, worker)
        if len(taken) < most:
            taken += self._take_from(None, most - len(taken), worker)
        if not taken:
            longest = max(self._waiting, key=lambda owner: len(self._waiting[owner]), default=None)
            if longest is not None and len(self._waiting[longest]) > MOST_TOGETHER:
                taken = self._take_from(longest, most, worker)
        while len(self._worker_of) > MOST_CONVERSATIONS:
            self._worker_of.popitem(last=False)
        return sorted(taken, key=lambda item: item.number)

    def forget_worker(self, worker: WorkerId) -> None:
        """A worker is gone: its conversations may go anywhere."""
        for conversation in [one for one, owner in self._worker_of.items() if owner == worker]:
            del self._worker_of[conversation]
        self._waiting.setdefault(None, deque()).extend(self._waiting.pop(worker, ()))

    def clear(self) -> list[Item]:
        """Take everything."""
        items = [item for waiting in self._waiting.values() for item in waiting]
        self._waiting.clear()
        self._num_waiting = 0
        return items

    def _take_from(self, owner: WorkerId | None, most: int, taker: WorkerId) -> list[Item]:
        """Requests that wait for an owner, or for nobody; what belongs to a third one by now is left to it."""
        waiting = self._waiting.get(owner, deque())
        taken: list[Item] = []
        while waiting and len(taken) < most:
            item = waiting.popleft()
            conversation = self._conversation_of(item.request)
            server = self._worker_of.get(conversation)
            if server not in (None, owner, taker):
                self._waiting.setdefault(server, deque()).append(item)
                continue
            taken.append(item)
            if conversation is not None:
                self._worker_of[conversation] = taker
                self._worker_of.move_to_end(conversation)
        self._num_waiting -= len(taken)
        return taken
