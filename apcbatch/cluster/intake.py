"""Requests as they come, in the plan's order: each gets its number and finds its leader.

Must not know: workers, units. Invariant: the leader of a request that resumes at a position is the last request before
it that the plan has keep a snapshot there of the same prefix.
"""

from __future__ import annotations

from apcbatch.cluster.items import Item, State
from apcbatch.cluster.unit import Key
from apcbatch.prefix import PrefixHasher
from apcbatch.types import Request


class Intake:
    """What was submitted and is not cut yet: `buffered`, in the plan's order."""

    def __init__(self, key_fingerprint: bytes) -> None:
        self._key_fingerprint = key_fingerprint
        self._latest: dict[Key, State] = {}  # those that have readers to come
        self._num_submitted = 0
        self.buffered: list[Item] = []
        self.buffered_tokens = 0

    def add(self, request: Request) -> Item:
        """Number a request and, if it has a plan, buffer it under its leader."""
        number = self._num_submitted
        self._num_submitted += 1
        item = Item(number, request)
        if request.plan is not None:
            self._link(item)
            self.buffered.append(item)
            self.buffered_tokens += len(request.token_ids)
        return item

    def take(self) -> list[Item]:
        """Everything that is buffered; it is not any more."""
        taken, self.buffered, self.buffered_tokens = self.buffered, [], 0
        return taken

    def drop(self) -> list[Item]:
        """As `take`, and no reader that was to come will."""
        for state in self._latest.values():
            state.unseen = 0
        self._latest.clear()
        return self.take()

    def _link(self, item: Item) -> None:
        plan = item.request.plan
        assert plan is not None, "only a request with a plan has a leader"
        positions = sorted({plan.resume_at, *plan.keep} - {0})
        if not positions:
            return
        keys = dict(PrefixHasher(self._key_fingerprint, item.tokens).keys_at(positions))
        state = self._latest.get(keys[plan.resume_at]) if plan.resume_at else None
        if state is not None:
            item.resume = state
            state.readers.add(item)
            state.unseen -= 1
            if not state.unseen:
                del self._latest[state.key]
        for position, reads in zip(plan.keep, plan.reads, strict=True):
            if reads:
                key = keys[position]
                made = State(key, position, item.number, reads, item, item.resume)
                item.keeps[position] = self._latest[key] = made
