"""Requests without a plan: rollouts, and policies that plan nothing. Those of one conversation go to one worker.

Must not know: units, states. Invariants: a request is taken once; the requests of a conversation are taken in order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from apcbatch.cluster.items import Item
from apcbatch.cluster.seam import WorkerId
from apcbatch.types import Request

MOST_TOGETHER = 32  # in one unit
MOST_CONVERSATIONS = 1 << 17  # whose worker is remembered


class LooseItems:
    """Waiting requests, a line for each conversation, by the worker that served it. A request that stands alone is a
    line of its own."""

    def __init__(self, conversation_of: Callable[[Request], Hashable]) -> None:
        """conversation_of: what the requests of one conversation have in common; None for a request that stands
        alone."""
        self._conversation_of = conversation_of
        self._worker_of: OrderedDict[Hashable, WorkerId] = OrderedDict()
        self._lines: dict[Hashable, deque[Item]] = {}
        self._owned: dict[WorkerId | None, dict[Hashable, None]] = {}  # the lines that wait for a worker, or for any
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Item]:
        return (item for line in self._lines.values() for item in line)

    def add(self, item: Item) -> None:
        """A request waits."""
        conversation = self._conversation_of(item.request)
        name = _Alone(item.number) if conversation is None else conversation
        if name not in self._lines:
            self._lines[name] = deque()
            self._owned.setdefault(self._worker_of.get(name), {})[name] = None
        self._lines[name].append(item)
        self._num_waiting += 1

    def take(self, worker: WorkerId, num_workers: int) -> list[Item]:
        """What a worker is given now: its own conversations, then new ones, then those that another one has too many
        of."""
        most = max(1, min(MOST_TOGETHER, -(-self._num_waiting // max(1, num_workers))))
        taken = self._take_from(worker, MOST_TOGETHER, worker)
        if len(taken) < most:
            taken += self._take_from(None, most - len(taken), worker)
        if not taken:
            longest = max(self._owned, key=lambda owner: len(self._owned[owner]), default=None)
            if longest is not None and len(self._owned[longest]) > MOST_TOGETHER:
                taken = self._take_from(longest, most, worker)
        while len(self._worker_of) > MOST_CONVERSATIONS:
            self._worker_of.popitem(last=False)
        return sorted(taken, key=lambda item: item.number)

    def forget_worker(self, worker: WorkerId) -> None:
        """A worker is gone: its conversations may go anywhere."""
        for conversation in [one for one, owner in self._worker_of.items() if owner == worker]:
            del self._worker_of[conversation]
        self._owned.setdefault(None, {}).update(self._owned.pop(worker, {}))

    def clear(self) -> list[Item]:
        """Take everything."""
        items = list(self)
        self._lines.clear()
        self._owned.clear()
        self._num_waiting = 0
        return items

    def _take_from(self, owner: WorkerId | None, most: int, taker: WorkerId) -> list[Item]:
        """The first requests of the lines that wait for an owner, or for any. What is left of a line waits for the
        taker."""
        owned = self._owned.get(owner, {})
        taken: list[Item] = []
        while owned and len(taken) < most:
            name = next(iter(owned))
            del owned[name]
            line = self._lines[name]
            while line and len(taken) < most:
                taken.append(line.popleft())
            if line:
                self._owned.setdefault(taker, {})[name] = None
            else:
                del self._lines[name]
            if not isinstance(name, _Alone):
                self._worker_of[name] = taker
                self._worker_of.move_to_end(name)
        self._num_waiting -= len(taken)
        return taken


@dataclass(frozen=True, slots=True)
class _Alone:
    """The line of a request that stands alone."""

    number: int
